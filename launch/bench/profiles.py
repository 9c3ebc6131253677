"""Where a run's time goes: its kernels, communication that nothing hides, and standing idle.

On a GPU these are its kernels, copies and fills; on a CPU PyTorch's operators, by their own time,
without a time line. Communication is what NCCL's kernels and copies between devices take, exposed
while nothing else runs on this device. Waiting for the other ranks is part of it within NCCL's
kernels; copies do not begin before, so there it is idling.
"""

import gzip
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from flce_dist.launch.write import replacing

Kind = Literal["products", "other", "communication"]

COMMUNICATION = re.compile(r"nccl|Memcpy PtoP")
PRODUCTS = re.compile(r"gemm|nvjet|cutlass|xmma|splitk|linear_stats|dlogits", re.IGNORECASE)
"""Matrix products by cuBLAS's names, and our kernels that multiply and go on in one pass."""
COPY_WITHIN = "Memcpy DtoD"
COPY_OR_FILL = ("Memcpy", "Memset")


@dataclass(frozen=True)
class Activity:
    """Something that ran on a stream of the device, from ``start_us`` to ``end_us``."""

    name: str
    start_us: float
    end_us: float
    stream: int = 0

    @property
    def kind(self) -> Kind:
        if COMMUNICATION.match(self.name):
            return "communication"
        return "products" if PRODUCTS.search(self.name) else "other"


@dataclass(frozen=True)
class KernelTime:
    """``launches`` and ``time_us`` are those of one call of the run."""

    name: str
    launches: float
    time_us: float


@dataclass(frozen=True)
class Profile:
    """Kernels by descending time, and what a call's time on the device was spent on.

    Each moment of ``step_us``, the time from the first to the last kernel over the calls, counts
    once: ``products_us + other_us + exposed_comm_us + idle_us`` are all of it. ``comm_us`` is
    communication with the part that other kernels hide. ``timeline`` is the middle one of the
    calls: kind of kernel, start and end in us. On a CPU all but the kernels is None or empty.
    """

    kernels: tuple[KernelTime, ...]
    idle_share: float | None = None
    step_us: float | None = None
    products_us: float | None = None
    other_us: float | None = None
    comm_us: float | None = None
    exposed_comm_us: float | None = None
    idle_us: float | None = None
    timeline: tuple[tuple[Kind, float, float], ...] = ()


def take_profile(
    call: Callable[[], Any], calls: int, device: torch.device, trace: Path | None = None
) -> Profile:
    """Profile ``calls`` calls back to back on ``device``; ``trace`` names a file for all events.

    One more goes before them, in which the profilers of all ranks start: on a GPU it is left out.
    """
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as prof:
        for _ in range(1 + calls):
            call()
        if on_gpu:
            torch.cuda.synchronize(device)
    if trace is not None:
        _write_trace(trace, prof)
    if not on_gpu:
        times = [(event.name, event.self_cpu_time_total) for event in prof.events() or []]
        return Profile(_by_name(times, 1 + calls))
    activities = [
        Activity(event.name, event.time_range.start, event.time_range.end, event.device_resource_id)
        for event in prof.events() or []
        # Annotations lie over the kernels that they name.
        if event.device_type == DeviceType.CUDA
        and not (event.is_user_annotation or event.name.startswith("nccl:"))
    ]
    later_calls = by_call(activities, 1 + calls)[1:]
    counted = [x for of_call in later_calls for x in of_call]
    return profile_of(counted, calls) if counted else profile_of(activities, 1 + calls)


def _write_trace(path: Path, prof: torch.profiler.profile) -> None:
    """Replace ``path`` by all events, compressed, in one step."""
    with tempfile.TemporaryDirectory() as folder:
        plain = f"{folder}/trace.json"
        prof.export_chrome_trace(plain)
        with (
            replacing(path) as scratch,
            open(plain, "rb") as events,
            gzip.GzipFile(scratch, "wb") as packed,
        ):
            shutil.copyfileobj(events, packed)


def profile_of(activities: list[Activity], calls: int) -> Profile:
    """Return the profile of what ``calls`` calls ran on the device."""
    kernels = _by_name([(x.name, x.end_us - x.start_us) for x in activities], calls)
    if not activities:
        return Profile(kernels)

    step_us = (max(x.end_us for x in activities) - min(x.start_us for x in activities)) / calls
    # Copies within the device, on streams where nothing is computed, move a rank's own part of a
    # gather: neither communication nor work that would hide it.
    others = [x for x in activities if x.kind != "communication"]
    computing = {x.stream for x in others if not x.name.startswith(COPY_OR_FILL)}
    activities = [
        x for x in activities if x.stream in computing or not x.name.startswith(COPY_WITHIN)
    ]

    def covered_us(*kinds: Kind) -> float:
        return covered(x for x in activities if x.kind in kinds) / calls

    products_us = covered_us("products")
    computing_us = covered_us("products", "other")
    busy_us = covered_us("products", "other", "communication")
    idle_us = max(0.0, step_us - busy_us)
    middle = (by_call(activities, calls) or [[]] * calls)[calls // 2]
    return Profile(
        kernels,
        idle_share=idle_us / step_us,
        step_us=step_us,
        products_us=products_us,
        other_us=computing_us - products_us,
        comm_us=covered_us("communication"),
        exposed_comm_us=busy_us - computing_us,
        idle_us=idle_us,
        timeline=tuple(
            (x.kind, x.start_us - middle[0].start_us, x.end_us - middle[0].start_us) for x in middle
        ),
    )


def covered(activities: Iterable[Activity]) -> float:
    """Return how long at least one activity lasts."""
    total = 0.0
    until = -float("inf")
    for x in sorted(activities, key=lambda x: x.start_us):
        total += max(0.0, x.end_us - max(x.start_us, until))
        until = max(until, x.end_us)
    return total


def by_call(activities: list[Activity], calls: int) -> list[list[Activity]]:
    """Return what each call ran, by start; [] if they did not launch the same number."""
    per_call, left_over = divmod(len(activities), calls)
    if left_over or not activities:
        return []
    ordered = sorted(activities, key=lambda x: x.start_us)
    return [ordered[i : i + per_call] for i in range(0, len(ordered), per_call)]


def describe(profile: Profile) -> str:
    """Say in a line what a call's time was spent on; of a profile of a GPU."""
    ms = {name.removesuffix("_us"): x / 1e3 for name, x in vars(profile).items() if "_us" in name}
    return (
        f"{ms['step']:.3f} ms: products {ms['products']:.3f}, other kernels {ms['other']:.3f}, "
        f"exposed communication {ms['exposed_comm']:.3f} ({ms['exposed_comm'] / ms['step']:.1%}) "
        f"of {ms['comm']:.3f}, idle {profile.idle_share:.1%}"
    )


def _by_name(times: list[tuple[str, float]], calls: int) -> tuple[KernelTime, ...]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, time_us in times:
        by_name[name].append(time_us)
    kernels = [KernelTime(name, len(x) / calls, sum(x) / calls) for name, x in by_name.items()]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.time_us))
