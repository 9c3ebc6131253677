"""Memory on each GPU of a group from which the other ranks copy: the protocol.

Copy engines and a stream's memory operations, which write a 32-bit word or wait for its value, need
no multiprocessor (docs/design.md).

Flags. Every rank publishes data in a block of its own, and has two flags for each peer r:

    flag       1 means                                     set by            cleared by
    READY[r]   r has written its block; it may be read     r, in pull        this rank, in pull
    FREE[r]    r has read this rank's block; it may be     r, in pull,       this rank, in acquire
               written                                     after its copies

A flag lies in the memory of the rank that waits for it. Between two uses READY is 0, FREE 1.

One use of a block; copies have a stream of their own:

    open      host only: see that the block is large enough, else all ranks meet and enlarge it
    acquire   current stream: wait for the copies of this rank's last use; wait for FREE of all
              peers, clear them
    (write)   current stream: the caller writes its block
    pull      current stream: set READY at all peers
              copy stream: wait for the current stream; wait for READY of all peers, clear them;
              copy from every peer; set FREE at all peers
    (read)    current stream: wait for the copies; read them, and this rank's own block
    close     copy stream: wait for the current stream, so that the next acquire comes after (read)

acquire and write may repeat before pull. All ranks make the same uses in the same order.
A use ``beside`` the current stream has acquire, write and pull on the copy stream, which first
waits for the current one, so that nothing of it delays kernels that come next.
Copies from several peers run one after the other on any streams (H200), so one stream is enough.

Why it cannot deadlock. Order all operations by pull, and within each pull: wait FREE, set READY,
wait READY, set FREE. Every rank issues in this order, and each wait is for a flag that its peer
sets earlier in it: FREE by the previous pull, READY by this one. So the first operation that is not
done never waits, even if all streams of a GPU share one hardware queue. Ranks issue NCCL's
collectives at the same places of the order.

CUDA graphs. The waiting rank clears the flag, so a use ends in the state it began in. All ranks
replay a graph or none does, on a stream that waits for earlier calls and that later ones wait for.
A call that needs more bytes than any before adds a block, which smaller calls then use, too.

Failures. After all ranks raised at the same place of a use, the next ``open`` lets all meet and
reset their flags; if one raised alone, its next ``open`` waits for the others in vain, and their
streams wait for its flags until ``watch.py`` ends their processes. A rank that raised alone between
two uses, and goes on with another call, is out of step unseen, as it would be with collectives: the
others take what it publishes next for what they wait for. So such a rank must end.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flce_dist.parallel.peers.driver import Block, PeerDriver, refuse_capture
from flce_dist.parallel.peers.watch import Wait, watch

READY = 0
FREE = 1
_PAGE = 2 << 20  # bytes; memory that other GPUs map is allocated in such pages

Copy = Callable[[int], tuple[Tensor, slice, Tensor, slice]]
"""From a rank to ``(out, its rows, that rank's tensor, its rows)``, both contiguous."""


class Arrival:
    """Copies in flight. It holds what they write and read here until they are done."""

    def __init__(self, driver: PeerDriver, stream: Any):
        self._driver = driver
        self._stream = stream
        self._held: list[Tensor] = []
        self._done = driver.event()

    def hold(self, x: Tensor) -> None:
        self._held.append(x)

    def copy(self, out: Tensor, rows: slice, theirs: Tensor, their_rows: slice) -> None:
        self.hold(out)
        self._driver.copy(out, rows, theirs, their_rows, self._stream)

    def record(self) -> None:
        self._done.record(self._stream)

    def wait(self) -> None:
        self._done.wait(self._driver.current_stream())
        self._held.clear()

    def __del__(self) -> None:
        for x in self._held:  # a call raised before it waited
            self._driver.keep(x, self._stream)


class PeerMemory:
    """A block of the same size on each rank of a group, which every rank can read."""

    def __init__(self, driver: PeerDriver, holds: str):
        self.P = driver.P
        self.rank = driver.rank
        # Starting at the next rank, so that all links are used evenly.
        self.peers = [(self.rank + i) % self.P for i in range(1, self.P)]
        self._driver = driver
        self._holds = holds
        self._stream = driver.side_stream()
        self._turn = driver.event()
        self._blocks: list[Block] = []  # the last is in use, earlier ones belong to graphs
        self._capture: int | None = None  # the open use's, 0 if not captured; None if none is open
        self._writable = False
        self._joined = 0  # the last capture that the copy stream was part of

        self._flags = driver.shared(4 * 2 * self.P)
        self._waits: list[Wait] = []
        self._await_ready = self._wait_and_clear(READY, f"to publish {holds}")
        self._await_free = self._wait_and_clear(FREE, f"to read {holds}")
        self._tell_ready, self._tell_free = (
            driver.batch(*(driver.put(self._flag(p, kind, self.rank), 1) for p in self.peers))
            for kind in (READY, FREE)
        )
        self._reset_flags()

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def open(self, nbytes: int) -> None:
        """Begin a use of ``nbytes``. If the block is too small, all ranks meet and hosts wait."""
        capture = self._driver.capture()
        if self._capture is not None:
            self._recover(capture)
        if not self._blocks or nbytes > self._blocks[-1].nbytes:
            self._grow(nbytes, capture)
        self._blocks[-1].in_graph |= capture != 0
        self._capture = capture
        self._writable = False

    def close(self) -> None:
        """End a use. Its last operation is the last one on the current stream."""
        self._order(self._driver.current_stream(), self._stream)
        self._capture = None

    def release(self) -> None:
        """Free all blocks that no CUDA graph uses. All ranks meet and hosts wait."""
        self._meet("gives memory back")
        self._blocks = [block for block in self._blocks if block.in_graph]

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._blocks[-1].of(rank, tuple(shape), dtype)

    def acquire(self) -> None:
        """Make the current stream wait until this rank's block may be written."""
        assert self._capture is not None, "not open"
        if self._writable:
            return
        here = self._driver.current_stream()
        if self._capture in (0, self._joined):  # else the last use is outside this graph
            self._order(self._stream, here)
        self._driver.enqueue(self._await_free, here)
        self._writable = True

    def pull(self, copy: Copy) -> Arrival:
        """Publish this block, copy from the peers'; the caller must wait for the arrival."""
        self.acquire()
        here = self._driver.current_stream()
        self._driver.enqueue(self._tell_ready, here)
        self._writable = False
        self._order(here, self._stream)
        self._joined = self._capture or 0
        return self._copied(Arrival(self._driver, self._stream), copy, self.peers)

    def pull_beside(self, mine: tuple[Tensor, slice, Tensor, slice], copy: Copy) -> Arrival:
        """Write ``mine`` to this block, publish it and copy from all ranks', on the copy stream."""
        assert self._capture is not None, "not open"
        driver = self._driver
        stream = self._stream
        arrival = Arrival(driver, stream)
        _, _, written, _ = mine
        arrival.hold(written)
        self._order(driver.current_stream(), stream)
        self._joined = self._capture or 0
        driver.enqueue(self._await_free, stream)
        driver.copy(*mine, stream)
        driver.enqueue(self._tell_ready, stream)
        return self._copied(arrival, copy, [*self.peers, self.rank])

    def _copied(self, arrival: Arrival, copy: Copy, ranks: Sequence[int]) -> Arrival:
        driver = self._driver
        stream = self._stream
        driver.enqueue(self._await_ready, stream)
        for rank in ranks:
            arrival.copy(*copy(rank))
        driver.enqueue(self._tell_free, stream)
        arrival.record()
        return arrival

    def copy(self, out: Tensor, rows: slice, source: Tensor, source_rows: slice) -> None:
        """Copy to or from this rank's block, on the current stream."""
        self._driver.copy(out, rows, source, source_rows, self._driver.current_stream())

    def _order(self, first: Any, then: Any) -> None:
        """Make a stream wait for all that another has been given."""
        self._turn.record(first)
        self._turn.wait(then)

    def _recover(self, capture: int) -> None:
        """Restore the flags after a use that raised and so was not closed."""
        if capture and capture == self._capture:
            raise RuntimeError(
                "an earlier call raised in this capture of a CUDA graph, which must not be "
                "replayed: end the capture and start a new one"
            )
        if self._capture == 0:
            refuse_capture("recovery from a call that raised", capturing=capture != 0)
            self._meet("recovers from a call that raised")
            self._reset_flags()
        self._capture = None

    def _grow(self, nbytes: int, capture: int) -> None:
        action = f"a block of {nbytes:,} bytes that other ranks can read"
        refuse_capture(action, capturing=capture != 0)
        self._meet(f"takes {nbytes:,} bytes")
        self._blocks = [block for block in self._blocks if block.in_graph]
        pages = max(1, -(-nbytes // _PAGE))
        self._blocks.append(self._driver.shared(pages * _PAGE))

    def _meet(self, action: str) -> None:
        """Wait until all ranks are here for the same reason and their GPUs are idle.

        They also learn which blocks some rank's graph uses, so that all keep the same ones.
        """
        in_graph = [block.in_graph for block in self._blocks]
        of_ranks = self._driver.meet(f"{action} for {self._holds}", in_graph)
        reasons = [reason for reason, _ in of_ranks]
        if len(set(reasons)) > 1:
            differing = "; ".join(f"rank {rank} {reason}" for rank, reason in enumerate(reasons))
            raise RuntimeError(f"ranks disagree on what to do next: {differing}")
        in_graphs = zip(*(of_rank for _, of_rank in of_ranks), strict=True)  # of ranks, by block
        for block, in_graph_of_ranks in zip(self._blocks, in_graphs, strict=True):
            block.in_graph = any(in_graph_of_ranks)

    def _reset_flags(self) -> None:
        flags = self._flags.of(self.rank, (2, self.P), torch.int32)
        flags[READY] = 0
        flags[FREE] = 1
        self._meet("sets its flags")

    def _flag(self, rank: int, kind: int, who: int) -> int:
        return self._flags.address(rank) + 4 * (kind * self.P + who)

    def _wait_and_clear(self, kind: int, purpose: str) -> Any:
        """Return operations that wait for the peers' flags on this rank, then clear them."""
        driver = self._driver
        flags = [self._flag(self.rank, kind, rank) for rank in self.peers]
        wait = Wait(driver.host_words(2), driver.limit_s, driver.where, f"other ranks {purpose}")
        watch(wait)
        self._waits.append(wait)
        return driver.batch(
            driver.put(wait.address(Wait.WAITS), 1),
            *(driver.wait_for(flag, 1) for flag in flags),
            *(driver.put(flag, 0) for flag in flags),
            driver.put(wait.address(Wait.PASSED), 1),
            driver.put(wait.address(Wait.WAITS), 0),
        )
