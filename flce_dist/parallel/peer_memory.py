"""Memory of a group's GPUs that each rank copies from by its copy engines.

NCCL's kernels need multiprocessors, and while a persistent kernel or a cuBLAS product runs there
are none: a collective that was issued beside a product runs after it. The copy engines need none,
nor do the streams' own memory operations, by which ranks tell each other what is ready. So tokens
[T, H] travel between GPUs of one host this way (``peer_copies.py``); all else is NCCL's.

One use of a rank's memory takes these steps, in the order of the current stream:

    open      the host sees to it that there is enough
    acquire   wait until this rank's last use is over, and every peer has read what it published
    (write)   kernels and copies of this rank
    pull      publish: tell every peer. Then on a stream of its own: wait until every peer has
              published, copy, tell them
    (read)    wait for what was copied, read this rank's own memory
    close     the next use waits for all that was issued before

acquire, write and pull may come several times. Each pair of ranks has two flags, ``READY`` at the
reader and ``FREE`` at the owner. Who waits for a flag takes it down, so that all are as before when
a use is over: CUDA graphs may replay it. Every rank issues what others wait for before it waits
itself, hence it does not matter if streams share one hardware queue
(``CUDA_DEVICE_MAX_CONNECTIONS=1``). Copies from several peers run one after the other on an H200,
whatever their streams: on one, first pieces come first.

Uses come in one order on all ranks. So a graph is replayed by all or none, on a stream that waits
for the calls before it and is waited for by those after it; calls among themselves may be on any
streams.

What goes wrong:

* A use that raises is not closed. The next one then begins with all ranks meeting and putting all
  flags right. That is so if every rank raised at the same place. A rank that raised alone waits in
  vain for the others to meet it and raises again, naming them; they wait for its flags until
  ``peer_watch.py`` ends them. No rank takes what was published for another use.
* A use in a capture that fails leaves nothing behind, since nothing of it ran. If it raises, its
  graph must not be replayed: the flags would be left halfway.
* A block that a graph may use is kept until its group is destroyed. Blocks only grow, so a graph
  adds one if it is the first to need so much, and calls that need less use that one, too.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flce_dist.parallel.peer_driver import Block, PeerDriver, refuse_capture
from flce_dist.parallel.peer_watch import Wait, watch

READY, FREE = 0, 1
_PAGE = 2 << 20  # bytes: GPU memory that others map comes in such pages

Copy = Callable[[int], tuple[Tensor, Tensor]]
"""From a peer's rank to ``(out, peer's tensor)``, of one shape, both contiguous."""


class Arrival:
    """Copies in flight. Where they go to is nobody else's before they are done."""

    def __init__(self, driver: PeerDriver, stream: Any):
        self._driver, self._stream = driver, stream
        self._outs: list[Tensor] = []
        self._done: Any = None

    def copy(self, out: Tensor, theirs: Tensor) -> None:
        self._outs.append(out)
        out.copy_(theirs, non_blocking=True)

    def record(self) -> None:
        self._done = self._stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait."""
        self._done.wait()
        self._outs.clear()

    def __del__(self) -> None:
        for out in self._outs:  # nobody waited: a call raised
            self._driver.keep(out, self._stream)


class PeerMemory:
    """As many bytes on each rank of a group, which every rank can read.

    All ranks must call the same methods in the same order with the same shapes.
    """

    def __init__(self, driver: PeerDriver, holds: str):
        self.P, self.rank = driver.P, driver.rank
        self.peers = [(self.rank + i) % self.P for i in range(1, self.P)]
        """The other ranks; each begins with another one, so that links are used evenly."""
        self._driver, self._holds = driver, holds
        self._stream = driver.side_stream()
        self._blocks: list[Block] = []  # the last one is in use, those before are in CUDA graphs
        self._capture: int | None = None
        """Which capture the use that is not closed yet is in; 0 is none, None no such use."""
        self._writable = False
        self._joined = 0
        """The last capture that the stream of the copies took part in."""

        self._flags = driver.shared(4 * 2 * self.P)
        self._peeked = driver.host_cells(2 * self.P)
        peers = self.peers
        self._waits: list[Wait] = []
        self._await_ready = self._take(READY, peers, f"to publish {holds}")
        self._await_free = self._take(FREE, peers, f"to read {holds}")
        self._tell_ready = [driver.put(self._flag(p, READY, self.rank), 1) for p in peers]
        self._tell_free = [driver.put(self._flag(p, FREE, self.rank), 1) for p in peers]
        self._set_flags()

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory held here, outside of PyTorch's caching allocator."""
        return sum(block.nbytes for block in self._blocks)

    def open(self, nbytes: int) -> None:
        """Begin a use of so many bytes. If there are too few, all ranks meet and hosts wait."""
        capture = self._driver.capture()
        if self._capture is not None:
            self._after_exception(capture)
        if not self._blocks or nbytes > self._blocks[-1].nbytes:
            self._grow(nbytes)
        self._blocks[-1].in_graph |= capture != 0
        self._capture, self._writable = capture, False

    def close(self) -> None:
        """End a use: what was issued on the current stream is the last of it."""
        self._stream.wait_stream(self._driver.current_stream())
        self._capture = None

    def release(self) -> None:
        """Give the memory back, but for what CUDA graphs use. All ranks meet and hosts wait."""
        self._meet("gives memory back")
        self._blocks = [block for block in self._blocks if block.in_graph]

    def own(self, shape: Sequence[int], dtype: torch.dtype, start: int = 0) -> Tensor:
        """View this rank's memory from byte ``start`` on."""
        return self.of(self.rank, shape, dtype, start)

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, start: int = 0) -> Tensor:
        """View a rank's memory from byte ``start`` on, a multiple of an element's bytes."""
        return self._blocks[-1].of(rank, tuple(shape), dtype, start)

    def acquire(self) -> None:
        """Make the current stream wait until this rank's memory may be written."""
        assert self._capture is not None, "not open"
        if self._writable:
            return
        here = self._driver.current_stream()
        if self._capture in (0, self._joined):  # else the last use was not of this graph
            here.wait_stream(self._stream)
        self._driver.enqueue(self._await_free, here)
        self._writable = True

    def pull(self, copies: Sequence[Copy]) -> list[Arrival]:
        """Publish what the current stream wrote, and copy what the peers published.

        Returns the arrival of each of ``copies``; they come one after the other. The last one must
        be waited for.
        """
        self.acquire()
        here = self._driver.current_stream()
        self._driver.enqueue(self._tell_ready, here)
        self._writable = False
        self._stream.wait_stream(here)
        self._joined = self._capture or 0
        arrivals = []
        with self._driver.on(self._stream):
            self._driver.enqueue(self._await_ready, self._stream)
            for i, copy in enumerate(copies, start=1):
                arrivals.append(Arrival(self._driver, self._stream))
                for peer in self.peers:
                    arrivals[-1].copy(*copy(peer))
                if i == len(copies):
                    self._driver.enqueue(self._tell_free, self._stream)
                arrivals[-1].record()
        return arrivals

    def _after_exception(self, capture: int) -> None:
        """Make up for a use that was not closed, before the next one."""
        if capture and capture == self._capture:
            raise RuntimeError(
                "an earlier call raised in this capture of a CUDA graph, which must not be "
                "replayed: end it, and capture anew"
            )
        if self._capture == 0:
            refuse_capture(capture != 0, "putting right what a call left that raised")
            self._meet("puts right what a call left that raised")
            self._set_flags()
        self._capture = None

    def _grow(self, nbytes: int) -> None:
        capturing = self._driver.capture() != 0
        refuse_capture(capturing, f"{nbytes:,} bytes of memory that other ranks can read")
        self._meet(f"takes {nbytes:,} bytes")
        self._blocks = [block for block in self._blocks if block.in_graph]
        pages = max(1, -(-nbytes // _PAGE))
        self._blocks.append(self._driver.shared(pages * _PAGE))

    def _meet(self, what: str) -> None:
        """Return when all ranks have come for the same, and their GPUs have done all before it.

        What is in a graph of any rank is so on each, so that all keep the same.
        """
        in_graph = sum(block.in_graph << i for i, block in enumerate(self._blocks))
        said = [
            word.split("|") for word in self._driver.meet(f"{what} for {self._holds}|{in_graph}")
        ]
        if len({what for what, _ in said}) > 1:
            each = "; ".join(f"rank {rank} {what}" for rank, (what, _) in enumerate(said))
            raise RuntimeError(f"ranks disagree on what comes next: {each}")
        for i, block in enumerate(self._blocks):
            block.in_graph = any(int(mask) >> i & 1 for _, mask in said)

    def _set_flags(self) -> None:
        """Let all be as it is between two uses."""
        flags = self._flags.of(self.rank, (2, self.P), torch.int32)
        flags[READY], flags[FREE] = 0, 1
        self._meet("sets its flags")

    def _flag(self, rank: int, kind: int, who: int) -> int:
        return self._flags.address(rank) + 4 * (kind * self.P + who)

    def _take(self, kind: int, ranks: list[int], what: str) -> list[Any]:
        """Return operations that wait for these ranks' flags here, and take them down."""
        driver, flags = self._driver, [self._flag(self.rank, kind, rank) for rank in ranks]
        memory = weakref.ref(self)

        def describe() -> tuple[str, str]:
            one = memory()
            missing = ranks if one is None else one._missing(kind, ranks)
            return driver.where, f"ranks {sorted(missing)} {what}"

        wait = Wait(driver.host_cells(2), driver.limit_s, describe)
        watch(wait)
        self._waits.append(wait)
        return [
            driver.put(wait.address(Wait.WAITS), 1),
            *(driver.wait_for(flag, 1) for flag in flags),
            *(driver.put(flag, 0) for flag in flags),
            driver.put(wait.address(Wait.PASSED), 1),
            driver.put(wait.address(Wait.WAITS), 0),
        ]

    def _missing(self, kind: int, ranks: list[int]) -> list[int]:
        """Return whose flags are still awaited, for a last message: all ranks' if unknown."""
        flags = self._flags.of(self.rank, (2 * self.P,), torch.int32)
        if self._driver.peek(flags, self._peeked):
            up = self._peeked.view(2, self.P)[kind].tolist()
            return [rank for rank in ranks if not up[rank]]
        return ranks
