"""Where a run's time goes: its kernels, and for how long the device stood idle between them.

On a GPU these are its kernels, copies and fills; on a CPU PyTorch's operators, by their own time.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity


@dataclass(frozen=True)
class KernelTime:
    """``launches`` and ``time_us`` are those of one call of the run."""

    name: str
    launches: float
    time_us: float


@dataclass(frozen=True)
class Profile:
    """Kernels by descending time; ``idle_share`` of the time from first to last is none's."""

    kernels: tuple[KernelTime, ...]
    idle_share: float | None


def take_profile(call: Callable[[], Any], calls: int, device: torch.device) -> Profile:
    """Profile ``calls`` calls back to back on ``device``."""
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as found:
        for _ in range(calls):
            call()
        if on_gpu:
            torch.cuda.synchronize(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in found.events() or [] if event.device_type == kind]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    times: dict[str, list[float]] = defaultdict(list)
    for event, (start, end) in zip(events, spans, strict=True):
        times[event.name].append(end - start if on_gpu else event.self_cpu_time_total)
    kernels = [
        KernelTime(name, len(each) / calls, sum(each) / calls) for name, each in times.items()
    ]
    kernels.sort(key=lambda kernel: -kernel.time_us)
    idle = None
    if on_gpu and spans:
        whole = max(end for _, end in spans) - min(start for start, _ in spans)
        idle = max(0.0, 1 - sum(end - start for start, end in spans) / whole)
    return Profile(tuple(kernels), idle)
