"""What peer memory asks of CUDA and of a group: streams, their memory operations, shared memory.

``peer_memory.py`` has the protocol and knows streams, flags and graphs by this class alone: tests
put one in its place that explores every order in which streams may run (tests/fake_cuda.py).
"""

import functools
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Private parts of torch, without types.
_c10d: Any = dist.distributed_c10d

_PEEK_S = 5.0
_host_cells: list[Tensor] = []


class Block:
    """As many bytes on each rank, which all can read. Views do not keep it: their owner must."""

    def __init__(self, nbytes: int, device: torch.device, group: Any):
        import torch.distributed._symmetric_memory as symmetric_memory

        self.nbytes = nbytes
        self.in_graph = False
        """Whether a CUDA graph of some rank may use it."""
        self._memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric_memory.rendezvous(self._memory, group)

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0) -> Tensor:
        """View a rank's part from byte ``start`` on, a multiple of an element's bytes."""
        return self._handle.get_buffer(rank, shape, dtype, start // dtype.itemsize)

    def address(self, rank: int) -> int:
        """Return where a rank's part begins, as streams of this rank see it."""
        return self._handle.buffer_ptrs[rank]


class PeerDriver:
    """CUDA and the store of one group, on this rank's device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.P, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.where = f"rank {self.rank} of group {group.group_name} on {device}"
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", _c10d.default_pg_timeout)
        self.limit_s: float = timeout.total_seconds()
        """How long ranks may wait for each other: what the group's collectives may take."""
        self._device, self._group_name = device, group.group_name
        store = _c10d._get_process_group_store(group)
        # A group made anew may find the store of its predecessor: the how-manyth is in each key.
        made = store.add(f"flce_dist/{self.rank}", 1)
        self._store, self._meetings = dist.PrefixStore(f"flce_dist/{made}", store), 0
        self._peeking = torch.cuda.Stream(device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def side_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=-1)

    def on(self, stream: torch.cuda.Stream) -> Any:
        """Make it the current stream of a block."""
        return torch.cuda.stream(stream)

    def capture(self) -> int:
        """Return which graph's capture the current stream is in: 0 is none, -1 one that failed."""
        if not torch.cuda.is_current_stream_capturing():
            return 0
        error, _, capture, *_ = _driver().cuStreamGetCaptureInfo(self.current_stream().cuda_stream)
        _check(error, "to say which CUDA graph is captured")
        return int(capture) or -1

    def keep(self, x: Tensor, stream: torch.cuda.Stream) -> None:
        """Do not give ``x``'s memory to others before a stream has done what it was given."""
        x.record_stream(stream)

    def shared(self, nbytes: int) -> Block:
        """Take memory on each rank. All ranks must do so, and hosts wait."""
        return Block(nbytes, self._device, self._group_name)

    def host_cells(self, n: int) -> Tensor:
        """Return [n] int32 zeros of the host's memory, to which ``put`` can write for ever."""
        _host_cells.append(torch.zeros(n, dtype=torch.int32, pin_memory=True))
        return _host_cells[-1]

    def put(self, address: int, value: int) -> Any:
        """Write 32 bits; what a stream wrote before is seen by who sees them."""
        driver = _driver()
        op = driver.CUstreamBatchMemOpParams()
        op.writeValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
        op.writeValue.address, op.writeValue.value = address, value
        return op

    def wait_for(self, address: int, value: int) -> Any:
        """Wait until 32 bits are ``value``."""
        driver = _driver()
        op = driver.CUstreamBatchMemOpParams()
        op.waitValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
        op.waitValue.address, op.waitValue.value = address, value
        op.waitValue.flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
        return op

    def enqueue(self, operations: list[Any], stream: torch.cuda.Stream) -> None:
        """Let a stream do these operations in their order."""
        (error,) = _driver().cuStreamBatchMemOp(stream.cuda_stream, len(operations), operations, 0)
        _check(error, "memory operations in a stream")

    def meet(self, word: str) -> list[str]:
        """Return every rank's word, once their GPUs have done what was issued before.

        Through the store, so that a rank that does not come is named, and no collective of another
        kind is taken for this one.
        """
        torch.cuda.synchronize(self._device)
        self._meetings += 1
        keys = [f"{self._meetings}/{rank}" for rank in range(self.P)]
        self._store.set(keys[self.rank], word)
        try:
            self._store.wait(keys, timedelta(seconds=self.limit_s))
        except RuntimeError as error:  # DistStoreError
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RuntimeError(
                f"{self.where} {word}, which all ranks must do together, but in {self.limit_s:g} s "
                f"nothing came from ranks {missing}: they failed, or make other calls"
            ) from error
        return [self._store.get(key).decode() for key in keys]

    def peek(self, x: Tensor, out: Tensor) -> bool:
        """Copy to host memory beside whatever streams wait for; return whether that could be done.

        For a last message only: it would spoil the capture of a CUDA graph.
        """
        with torch.cuda.stream(self._peeking):
            out.copy_(x, non_blocking=True)
            done = self._peeking.record_event()
        deadline = time.monotonic() + _PEEK_S
        while not done.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


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


def _check(error: Any, what: str) -> None:
    if error:
        raise RuntimeError(f"the CUDA driver refused {what}: {error.name}")


def refuse_capture(capturing: bool, what: str) -> None:
    """Raise if a CUDA graph is captured in which ``what`` cannot be done."""
    if capturing:
        raise RuntimeError(
            f"{what}: cannot be set up while a CUDA graph is captured; "
            "run the same call once before the capture"
        )
