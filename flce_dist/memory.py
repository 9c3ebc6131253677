"""Measure the peak memory of a piece of code: forward, backward and kernels' own temporaries.

On a GPU the caching allocator keeps the count. On CPU PyTorch keeps none, so its profiler
reports every allocation and release of the CPU allocator, and the peak of their running sum is
taken. (A TorchDispatchMode would be simpler but sees only what operators return: `logsumexp`
allocates a whole copy of its input inside, which only the allocator knows.)
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler

from flce_dist.parallel import transport

_one_profiler = threading.Lock()


@dataclass
class PeakMemory:
    """What a ``peak_memory`` block measured; filled in when the block ends.

    Attributes:
        bytes: the most that was allocated at one time above what was live at the start.
        shared_bytes: what this process holds at the end for other GPUs of its host to read, which
            PyTorch's allocator does not count. It stays, for the largest call so far: add it where
            the block used it, as calls under sequence parallelism do.
    """

    bytes: int = 0
    shared_bytes: int = 0


@contextmanager
def peak_memory(device: torch.device | str) -> Iterator[PeakMemory]:
    """Measure the peak of tensor memory on ``device`` inside the block, above its start.

    ::

        with peak_memory(hidden.device) as peak:
            loss_fn(hidden, weight, labels).backward()
        print(peak.bytes)

    On CPU it counts the calling thread, where autograd also runs a CPU backward; memory that
    NumPy or oneDNN allocates by itself is not seen. Tensors made before the block must outlive it:
    the profiler does not know the size of what it did not see allocated.

    Args:
        device: "cpu", "cuda" or "cuda:<i>".

    Raises:
        RuntimeError: if two blocks on CPU overlap in one process, nested or in threads.
    """
    device = torch.device(device)
    peak = PeakMemory()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start_bytes = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - start_bytes
        peak.shared_bytes = transport.held_bytes()
        return

    if not _one_profiler.acquire(blocking=False):
        raise RuntimeError("peak_memory on CPU must not overlap with another one in this process")
    # Kineto otherwise prints a line to stderr at each start and stop; read at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        with profiler.profile(profile_memory=True) as prof:
            yield peak
        peak.bytes = _peak_of_running_sum(prof)
    finally:
        _one_profiler.release()


def release_shared_memory() -> None:
    """Give memory back that GPUs of this host read from each other under sequence parallelism.

    It stays, for the largest call so far: the next call takes what it needs, and waits for it. What
    captured CUDA graphs use stays until their process group is destroyed, as long as they may be
    replayed. All ranks of the groups concerned must call this, and their hosts wait for each other.
    """
    transport.release()


def _peak_of_running_sum(prof: profiler.profile) -> int:
    assert prof.kineto_results is not None
    all_events: list[Any] = prof.kineto_results.events()
    events = [event for event in all_events if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
