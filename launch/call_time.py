"""The time of a call: by the GPU's events, or by the clock without a GPU; and of many."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


def call_ms(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Return the milliseconds of one of ``calls`` calls back to back."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - started) * 1e3 / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def percentiles(samples: Sequence[float]) -> list[float]:
    """Return p20, p50 and p80."""
    found: list[float] = np.quantile(samples, (0.2, 0.5, 0.8)).tolist()
    return found
