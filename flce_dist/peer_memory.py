"""Memory of a group's GPUs that each rank copies from by its copy engines.

NCCL's kernels need multiprocessors, and while a persistent kernel or a cuBLAS product runs there
are none: a collective that was issued beside a product runs after it. The copy engines need none,
nor do the streams' own memory operations, by which ranks tell each other what is ready. So tokens
[T, H] travel between GPUs of one host this way (``peer_copies.py``); all else is NCCL's.

One rank's memory goes through these steps, in the order of its stream:

    acquire   wait until every peer has read what was published last
    (write)   kernels and copies of this rank
    publish   tell every peer
    pull      on a stream of its own: wait until every peer has published, copy, tell them

Two flags for each pair of ranks say so, ``READY`` at the reader and ``FREE`` at the owner. Who
waits for a flag takes it down, so that all are as before when a turn is over: CUDA graphs may
replay it. Every rank issues what others wait for before it waits itself, hence it does not matter
if streams share one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``). Copies from several peers
run one after the other on an H200, whatever their streams: on one, first pieces come first.
"""

import functools
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

READY, FREE = 0, 1
_PAGE = 2 << 20  # bytes: GPU memory that others map comes in such pages

Copy = Callable[[int], tuple[Tensor, Tensor]]
"""From a peer's rank to ``(out, peer's tensor)``, of one shape, both contiguous."""


class PeerMemory:
    """As many bytes on each rank of a group, which every rank can read.

    All ranks must call the same methods in the same order with the same shapes.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.P, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.peers = [(self.rank + i) % self.P for i in range(1, self.P)]
        """The other ranks; each begins with another one, so that links are used evenly."""
        self._group, self._device = group, device
        self._stream = torch.cuda.Stream(device, priority=-1)
        # With the handles to theirs; the last one is in use, those before are in CUDA graphs.
        self._held: list[tuple[Tensor, Any]] = []
        self._writable = self._in_graph = False

        self._flags = flags, handle = _shared(2 * self.P, torch.int32, device, group)
        flags.view(2, self.P)[READY], flags.view(2, self.P)[FREE] = 0, 1
        at = _Flags(list(handle.buffer_ptrs), self.P)
        mine = self.rank
        self._await_free = [op for p in self.peers for op in at.take(mine, FREE, p)]
        self._tell_ready = [at.put(p, READY, mine) for p in self.peers]
        self._await_ready = [op for p in self.peers for op in at.take(mine, READY, p)]
        self._tell_free = [at.put(p, FREE, mine) for p in self.peers]
        self._meet()

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory held here, outside of PyTorch's caching allocator."""
        return sum(memory.numel() for memory, _ in self._held)

    def reserve(self, nbytes: int) -> None:
        """Hold at least so many bytes. If there are too few, all ranks meet and hosts wait."""
        if self._held and nbytes <= self._held[-1][0].numel():
            return
        _refuse_capture(f"{nbytes:,} bytes of memory that other ranks can read")
        self._meet()
        if not self._in_graph:
            self._held.clear()
        self._in_graph = False
        pages = max(1, -(-nbytes // _PAGE))
        self._held.append(_shared(pages * _PAGE, torch.uint8, self._device, self._group))

    def release(self) -> None:
        """Give the memory back, but for what CUDA graphs use. All ranks meet and hosts wait."""
        self._meet()
        if not self._in_graph:
            self._held.clear()

    def own(self, shape: Sequence[int], dtype: torch.dtype, start: int = 0) -> Tensor:
        """View this rank's memory from byte ``start`` on."""
        return self.of(self.rank, shape, dtype, start)

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, start: int = 0) -> Tensor:
        """View a rank's memory from byte ``start`` on, a multiple of an element's bytes."""
        _, handle = self._held[-1]
        return handle.get_buffer(rank, tuple(shape), dtype, start // dtype.itemsize)

    def acquire(self) -> None:
        """Make the current stream wait until this rank's memory may be written."""
        if self._writable:
            return
        here = torch.cuda.current_stream()
        capturing = _captures(here)
        self._in_graph |= capturing
        if capturing == _captures(self._stream):  # else what was read was not of this graph
            here.wait_stream(self._stream)
        _enqueue(self._await_free, here)
        self._writable = True

    def pull(self, copies: Sequence[Copy]) -> list[torch.cuda.Event]:
        """Publish what the current stream wrote, and copy what the peers published.

        One event for each of ``copies``, its arrival; they come one after the other. The last one
        must be waited for.
        """
        here = torch.cuda.current_stream()
        self.acquire()
        _enqueue(self._tell_ready, here)
        self._writable = False
        self._stream.wait_stream(here)
        arrivals = []
        with torch.cuda.stream(self._stream):
            _enqueue(self._await_ready, self._stream)
            for i, copy in enumerate(copies, start=1):
                for peer in self.peers:
                    out, theirs = copy(peer)
                    out.copy_(theirs, non_blocking=True)
                if i == len(copies):
                    _enqueue(self._tell_free, self._stream)
                arrivals.append(self._stream.record_event())
        return arrivals

    def end_read(self) -> None:
        """Let the next one who acquires this rank's memory wait for what was issued here."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def _meet(self) -> None:
        """Return when all ranks' GPUs have done what was issued before."""
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group, device_ids=[self._device.index])
        torch.cuda.synchronize(self._device)


class _Flags(NamedTuple):
    """Memory operations on the flags [2, P] of each rank, which lie at ``addresses``."""

    addresses: list[int]
    P: int

    def put(self, rank: int, kind: int, who: int) -> Any:
        """Put up a flag at ``rank``; what was written before is seen by who sees it."""
        driver = _driver()
        op = driver.CUstreamBatchMemOpParams()
        op.writeValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
        op.writeValue.address = self._address(rank, kind, who)
        op.writeValue.value = 1
        return op

    def take(self, rank: int, kind: int, who: int) -> list[Any]:
        """Wait for a flag at ``rank``, and take it down."""
        driver = _driver()
        wait = driver.CUstreamBatchMemOpParams()
        wait.waitValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
        wait.waitValue.address = self._address(rank, kind, who)
        wait.waitValue.value = 1
        wait.waitValue.flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
        down = self.put(rank, kind, who)
        down.writeValue.value = 0
        return [wait, down]

    def _address(self, rank: int, kind: int, who: int) -> int:
        return self.addresses[rank] + 4 * (kind * self.P + who)


class PeerMemories(NamedTuple):
    """One for each direction, so that neither waits for what peers still read of the other."""

    hidden: PeerMemory
    dhidden: PeerMemory


_memories: dict[tuple[str, torch.device], tuple[dist.ProcessGroup, PeerMemories | None]] = {}


def of_group(group: dist.ProcessGroup, device: torch.device) -> PeerMemories | None:
    """Return the memories that a group's ranks share, or None if not all can read each other's.

    They can if they are processes of one host over NCCL, each with a GPU of its own that reaches
    the others', and no rank has ``NCCL_P2P_DISABLE=1`` in its environment. Asked once for a group,
    which is a collective that hosts wait for.
    """
    if device.type != "cuda" or dist.get_world_size(group) == 1:
        return None
    key = (group.group_name, device)
    asked, memories = _memories.get(key, (None, None))
    if asked is not group:
        _refuse_capture("the first call of a group under sequence parallelism")
        memories = None
        if _all_reach_all(group, device):
            memories = PeerMemories(PeerMemory(group, device), PeerMemory(group, device))
        _memories[key] = group, memories
    return memories


def held_bytes() -> int:
    """Bytes of GPU memory that this process holds for its groups, beside PyTorch's own."""
    return sum(memory.nbytes for _, both in _memories.values() for memory in both or ())


def release() -> None:
    """Give the memory of all groups back. Every rank of each group must do so."""
    for _, both in _memories.values():
        for memory in both or ():
            memory.release()


class _Site(NamedTuple):
    """Where a rank is, and which GPUs that it sees its own one reaches."""

    host: tuple[str, str]
    gpu: str
    reaches: dict[str, bool]
    willing: bool


def _all_reach_all(group: dist.ProcessGroup, device: torch.device) -> bool:
    if "cuda:nccl" not in dist.get_backend_config(group):
        return False
    gpus = [_gpu_name(i) for i in range(torch.cuda.device_count())]
    others = [i for i in range(len(gpus)) if i != device.index]
    mine = _Site(
        host=(socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text()),
        gpu=gpus[device.index],
        reaches={gpus[i]: torch.cuda.can_device_access_peer(device, i) for i in others},
        willing=os.environ.get("NCCL_P2P_DISABLE", "0") == "0",
    )
    sites: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(sites, mine, group=group)
    return (
        all(site.willing and site.host == mine.host for site in sites)
        and len({site.gpu for site in sites}) == len(sites)
        # Of a GPU that a rank does not see it cannot tell.
        and all(one.reaches.get(other.gpu, True) for one in sites for other in sites)
    )


def _gpu_name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _shared(
    n: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, Any]:
    """Return n cells of memory that all ranks of the group can read, and the handle to theirs."""
    import torch.distributed._symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(n, dtype=dtype, device=device)
    return memory, symmetric_memory.rendezvous(memory, group)


@functools.cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError(
            "sequence parallelism between GPUs of one host needs the package cuda-bindings, which "
            "PyTorch's CUDA builds bring along: install it in CUDA's version, or set "
            "NCCL_P2P_DISABLE=1 to use NCCL's collectives alone"
        ) from error
    return driver


def _enqueue(operations: list[Any], stream: torch.cuda.Stream) -> None:
    """Let a stream do these operations in their order."""
    (error,) = _driver().cuStreamBatchMemOp(stream.cuda_stream, len(operations), operations, 0)
    if error:
        raise RuntimeError(f"the CUDA driver refused memory operations in a stream: {error.name}")


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _refuse_capture(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what}: cannot be set up while a CUDA graph is captured; "
            "run the same call once before the capture"
        )
