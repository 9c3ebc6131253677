"""CUDA as ``peer_memory.py`` uses it; in tests a driver explores all orders of streams instead."""

import functools
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import torch_private

_SNAPSHOT_S = 5.0
_host_words: list[Tensor] = []


class Block:
    """Bytes on each rank that all ranks can read. Views do not keep the memory alive."""

    def __init__(self, nbytes: int, device: torch.device, group: Any):
        self.nbytes = nbytes
        self.in_graph = False  # whether a CUDA graph of some rank uses it
        self._memory, self._handle = torch_private.shared_memory(nbytes, device, group)

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._handle.get_buffer(rank, shape, dtype)

    def address(self, rank: int) -> int:
        """Return the address of a rank's first byte, as streams of this rank see it."""
        return self._handle.buffer_ptrs[rank]


class PeerDriver:
    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.P, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.where = f"rank {self.rank} of group {group.group_name} on {device}"
        # Ranks wait for each other as long as the group's collectives may.
        self.limit_s = torch_private.timeout_of(group, device).total_seconds()
        self._device, self._group_name = device, group.group_name
        store = torch_private.store_of(group)
        # A new group may get the store of a destroyed one, so keys begin with a running number.
        number = store.add(f"flce_dist/{self.rank}", 1)
        self._store, self._meetings = dist.PrefixStore(f"flce_dist/{number}", store), 0
        self._snapshot_stream = torch.cuda.Stream(device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def side_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=-1)

    def on(self, stream: torch.cuda.Stream) -> Any:
        return torch.cuda.stream(stream)

    def capture(self) -> int:
        """Return the id of the current stream's capture: 0 for none, -1 for one that failed."""
        if not torch.cuda.is_current_stream_capturing():
            return 0
        error, _, capture, *_ = _driver().cuStreamGetCaptureInfo(self.current_stream().cuda_stream)
        _check(error, "the id of a capture")
        return int(capture) or -1

    def keep(self, x: Tensor, stream: torch.cuda.Stream) -> None:
        x.record_stream(stream)

    def shared(self, nbytes: int) -> Block:
        """Allocate memory on each rank. All ranks must call this; hosts wait for each other."""
        return Block(nbytes, self._device, self._group_name)

    def host_words(self, n: int) -> Tensor:
        """Return [n] int32 zeros of pinned host memory; never freed, as a graph may write them."""
        _host_words.append(torch.zeros(n, dtype=torch.int32, pin_memory=True))
        return _host_words[-1]

    def put(self, address: int, value: int) -> Any:
        """Write a word. Whoever sees it also sees all that the stream wrote before."""
        driver = _driver()
        op = driver.CUstreamBatchMemOpParams()
        op.writeValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
        op.writeValue.address, op.writeValue.value = address, value
        return op

    def wait_for(self, address: int, value: int) -> Any:
        driver = _driver()
        op = driver.CUstreamBatchMemOpParams()
        op.waitValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
        op.waitValue.address, op.waitValue.value = address, value
        op.waitValue.flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
        return op

    def enqueue(self, operations: list[Any], stream: torch.cuda.Stream) -> None:
        (error,) = _driver().cuStreamBatchMemOp(stream.cuda_stream, len(operations), operations, 0)
        _check(error, "memory operations on a stream")

    def meet(self, message: str) -> list[str]:
        """Return every rank's message, once all ranks have called this and their GPUs are idle.

        By the store: a rank that issues a collective instead cannot be mistaken for one that is
        here, and an error names the missing ranks.
        """
        torch.cuda.synchronize(self._device)
        self._meetings += 1
        keys = [f"{self._meetings}/{rank}" for rank in range(self.P)]
        self._store.set(keys[self.rank], message)
        try:
            self._store.wait(keys, timedelta(seconds=self.limit_s))
        except RuntimeError as error:  # DistStoreError
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RuntimeError(
                f"{self.where} {message}, which all ranks must do together, but ranks {missing} "
                f"did not join within {self.limit_s:g} s: they failed, or make other calls"
            ) from error
        return [self._store.get(key).decode() for key in keys]

    def snapshot(self, x: Tensor, out: Tensor) -> bool:
        """Copy to host memory while other streams wait, if it can; breaks a graph's capture."""
        with torch.cuda.stream(self._snapshot_stream):
            out.copy_(x, non_blocking=True)
            done = self._snapshot_stream.record_event()
        deadline = time.monotonic() + _SNAPSHOT_S
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
            "PyTorch's CUDA builds depend on: install the release for your CUDA version, or set "
            "FLCE_DIST_PEER_COPIES=0 to use NCCL's collectives alone"
        ) from error
    return driver


def _check(error: Any, what: str) -> None:
    if error:
        raise RuntimeError(f"the CUDA driver refused {what}: {error.name}")


def refuse_capture(capturing: bool, what: str) -> None:
    if capturing:
        raise RuntimeError(
            f"{what}: not possible while a CUDA graph is captured; "
            "run the same call once before the capture"
        )
