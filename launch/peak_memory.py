"""Measure the peak memory of a block of code: forward, backward and operators' temporaries."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.autograd import profiler

from flce_dist.memory import shared_bytes

_one_profiler = threading.Lock()


@dataclass
class PeakMemory:
    """What a ``peak_memory`` block measured; filled in when the block ends."""

    bytes: int = 0  # the most allocated at one time, minus those at the start
    shared_bytes: int = 0  # at the end; add them if the block called the loss sequence parallel


@contextmanager
def peak_memory(device: torch.device | str) -> Iterator[PeakMemory]:
    """Measure the peak of tensor memory on ``device`` inside the block, relative to its start.

    ::

        with peak_memory(hidden.device) as peak:
            loss_fn(hidden, weight, labels).backward()
        print(peak.bytes)

    On CPU it counts the calling thread, where autograd also runs a CPU backward, and copies that
    gloo's threads make for it, which live until other ranks arrive; but not memory that NumPy or
    oneDNN allocate themselves. Tensors made before the block must outlive it.

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
        peak.shared_bytes = shared_bytes()
        return

    if not _one_profiler.acquire(blocking=False):
        raise RuntimeError("peak_memory on CPU must not overlap with another one in this process")
    # Else Kineto prints a line to stderr at each start and stop. It reads this at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        with profiler.profile(profile_memory=True) as prof:
            yield peak
        assert prof.kineto_results is not None
        events: list[Any] = prof.kineto_results.events()
        events = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
        peak.bytes = max(accumulate((e.nbytes() for e in events), initial=0))
    finally:
        _one_profiler.release()
