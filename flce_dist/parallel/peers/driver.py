"""CUDA as ``memory.py`` uses it; in tests a driver explores all orders of streams instead.

Streams are CUDA's handles, and an operation is one call of its driver's C interface: PyTorch's
streams and copies cost the host several times as much.
"""

import ctypes
import functools
import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.torch_private.devices import current_stream, shared_memory
from flce_dist.torch_private.groups import store_of, timeout_of

_MOST_VIEWS = 64  # of a block
_WAIT_VALUE_32 = 1  # of cuda.h
_WRITE_VALUE_32 = 2
_WAIT_VALUE_EQ = 1
_DISABLE_TIMING = 2
_host_words: list[Tensor] = []


class Block:
    """Bytes on each rank that all ranks can read. Views do not keep the memory alive."""

    def __init__(self, nbytes: int, device: torch.device, group: Any):
        self.nbytes = nbytes
        self.in_graph = False  # whether a CUDA graph of some rank uses it
        self._memory, self._handle = shared_memory(nbytes, device, group)
        self._views: dict[Any, Tensor] = {}

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        view = self._views.get((rank, shape, dtype))
        if view is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            view = self._handle.get_buffer(rank, shape, dtype)
            self._views[rank, shape, dtype] = view
        return view

    def address(self, rank: int) -> int:
        """Return the address of a rank's first byte, as streams of this rank see it."""
        return self._handle.buffer_ptrs[rank]


class Event:
    """A place in a stream, for others to wait for."""

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        self._destroy = _cuda().cuEventDestroy_v2
        _cuda().cuEventCreate(self.handle, _DISABLE_TIMING)

    def record(self, stream: int) -> None:
        _cuda().cuEventRecord(self.handle, stream)

    def wait(self, stream: int) -> None:
        """Make a stream wait for what was recorded last."""
        _cuda().cuStreamWaitEvent(stream, self.handle, 0)

    def __del__(self) -> None:
        self._destroy(self.handle)


def number_of_set_up(group: dist.ProcessGroup) -> int:
    """Return a number that no earlier set-up had at the group's store, the same on all ranks.

    A new group may get the store of a destroyed one, and ranks that failed alone set up again.
    Rank 0 counts for all: ranks' own counts would differ once one of them has failed.
    """
    is_first = dist.get_rank(group) == 0
    number = store_of(group).add("flce_dist", 1) if is_first else 0
    numbers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(numbers, number, group=group)
    return numbers[0]


class PeerDriver:
    def __init__(self, group: dist.ProcessGroup, device: torch.device, keys: str):
        """``keys`` are what this driver's keys in the store begin with, the same on all ranks."""
        self.P = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.where = f"rank {self.rank} of group {group.group_name} on {device}"
        # Ranks wait for each other as long as the group's collectives may.
        self.limit_s = timeout_of(group, device).total_seconds()
        self._device = device
        self._group_name = group.group_name
        store = store_of(group)
        self._store = dist.PrefixStore(f"flce_dist/{keys}", store)
        self._meetings = 0
        self._side_streams: list[torch.cuda.Stream] = []  # which must outlive their handles

    def current_stream(self) -> int:
        return current_stream(self._device)

    def side_stream(self) -> int:
        self._side_streams.append(torch.cuda.Stream(self._device, priority=-1))
        return self._side_streams[-1].cuda_stream

    def capture(self) -> int:
        """Return the id of the current stream's capture: 0 for none, -1 for one that failed."""
        if not torch.cuda.is_current_stream_capturing():
            return 0
        status = ctypes.c_int()
        capture = ctypes.c_uint64()
        stream = self.current_stream()
        refs = ctypes.byref(status), ctypes.byref(capture)
        _cuda().cuStreamGetCaptureInfo_v2(stream, *refs, None, None, None)
        return capture.value or -1

    def event(self) -> Event:
        return Event()

    def copy(
        self, out: Tensor, rows: slice, source: Tensor, source_rows: slice, stream: int
    ) -> None:
        """Copy ``source_rows`` of ``source`` to ``rows`` of ``out``; both contiguous."""
        row = out.nbytes // max(1, len(out))  # the stride of a single row may be any
        to = out.data_ptr() + rows.start * row
        begin = source.data_ptr() + source_rows.start * row
        if nbytes := (rows.stop - rows.start) * row:
            _cuda().cuMemcpyDtoDAsync_v2(to, begin, nbytes, stream)

    def keep(self, x: Tensor, stream: int) -> None:
        x.record_stream(torch.cuda.ExternalStream(stream, self._device))

    def shared(self, nbytes: int) -> Block:
        """Allocate memory on each rank. All ranks must call this; hosts wait for each other."""
        return Block(nbytes, self._device, self._group_name)

    def host_words(self, n: int) -> Tensor:
        """Return [n] int32 zeros of pinned host memory; never freed, as a graph may write them."""
        _host_words.append(torch.zeros(n, dtype=torch.int32, pin_memory=True))
        return _host_words[-1]

    def put(self, address: int, value: int) -> Any:
        """Write a word. Whoever sees it also sees all that the stream wrote before."""
        return _MemOp(_WRITE_VALUE_32, address, value)

    def wait_for(self, address: int, value: int) -> Any:
        return _MemOp(_WAIT_VALUE_32, address, value, _WAIT_VALUE_EQ)

    def batch(self, *operations: Any) -> Any:
        """Return what ``enqueue`` takes, any number of times."""
        return (_MemOp * len(operations))(*operations)

    def enqueue(self, batch: Any, stream: int) -> None:
        _cuda().cuStreamBatchMemOp_v2(stream, len(batch), batch, 0)

    def meet(self, reason: str, facts: Any) -> list[tuple[str, Any]]:
        """Return every rank's reason and facts, once all have called this and GPUs are idle.

        By the store: a rank that issues a collective instead cannot be mistaken for one that is
        here, and an error names the missing ranks.
        """
        torch.cuda.synchronize(self._device)
        self._meetings += 1
        keys = [f"{self._meetings}/{rank}" for rank in range(self.P)]
        self._store.set(keys[self.rank], json.dumps([reason, facts]))
        try:
            self._store.wait(keys, timedelta(seconds=self.limit_s))
        except RuntimeError as error:  # DistStoreError
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RuntimeError(
                f"{self.where} {reason}, which all ranks must do together, but ranks {missing} "
                f"did not join within {self.limit_s:g} s: they failed, or make other calls"
            ) from error
        return [tuple(json.loads(self._store.get(key))) for key in keys]


class _MemOp(ctypes.Structure):
    """``CUstreamBatchMemOpParams``, a union of structures that begin alike."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("rest", ctypes.c_uint64),
    )


@functools.cache
def _cuda() -> Any:
    """Return CUDA's driver, which PyTorch has loaded; its functions raise what they return."""
    cuda = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    word = ctypes.c_uint32
    wide = ctypes.c_uint64
    for name, *types in (
        ("cuEventCreate", ctypes.POINTER(pointer), word),
        ("cuEventRecord", pointer, pointer),
        ("cuStreamWaitEvent", pointer, pointer, word),
        ("cuStreamBatchMemOp_v2", pointer, word, ctypes.POINTER(_MemOp), word),
        ("cuMemcpyDtoDAsync_v2", wide, wide, ctypes.c_size_t, pointer),
        ("cuStreamGetCaptureInfo_v2", *(pointer,) * 6),
    ):
        function = getattr(cuda, name)
        function.argtypes = types
        function.errcheck = _check
    cuda.cuEventDestroy_v2.argtypes = (pointer,)  # nothing to raise from
    return cuda


def _check(status: int, function: Any, arguments: Any) -> None:
    if status:
        name = ctypes.c_char_p()
        _cuda().cuGetErrorName(status, ctypes.byref(name))
        error = (name.value or b"an unknown error").decode()
        raise RuntimeError(f"{function.__name__} of the CUDA driver: {error}")


def refuse_capture(action: str, *, capturing: bool) -> None:
    if capturing:
        raise RuntimeError(
            f"{action}: not possible while a CUDA graph is captured; "
            "run the same call once before the capture"
        )
