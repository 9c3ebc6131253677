"""Check linear_cross_entropy on the hardware at hand, before trusting a training run to it.

    torchrun --nproc-per-node 8 -m flce_dist.launch.verify --output verify.json
    python -m flce_dist.launch.verify --dtypes fp32 --shapes 64 48 1000   # one process

All ranks form one tensor-parallel group. Every schedule, reduction and main option, with and
without sequence parallelism, is compared with fp64; filtered gradients, which belong to recompute
and have a shape of their own, are compared with their definition in fp64. Tokens and vocabulary are
rounded up to multiples of the ranks. Errors are printed beside their budgets, the worst case of
each table first. The exit status is 1 if a budget is missed on any rank, and 2 if what was asked
for cannot be checked, such as a shape that does not fit into memory. NCCL on GPUs, gloo elsewhere.
"""

from flce_dist.launch.program import launcher_number, run_program  # isort: skip  # before other packages

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.progress import Progress

from flce_dist import plan
from flce_dist.arguments.options import Impl, ScheduleName
from flce_dist.launch.about import about
from flce_dist.launch.process_group import (
    Group,
    device_type_of,
    failures,
    rank_and_size,
    reduced,
    start,
)
from flce_dist.launch.ranges import SEED, SIZE
from flce_dist.launch.verify import cases
from flce_dist.launch.verify.checks import Truth, inputs_and_truths, run_case
from flce_dist.launch.verify.data import Data
from flce_dist.launch.verify.report import (
    Record,
    passed,
    summary,
    table,
    worst_case,
    worst_of_ranks,
)
from flce_dist.launch.write import check_writable, write_json
from flce_dist.launch.yaml_config import ConfigError, check_ranges, check_values, require

Size = Annotated[int, SIZE]
Tokens = Annotated[int, cases.TOKENS]
Vocabulary = Annotated[int, cases.VOCABULARY]
MEMINFO = Path("/proc/meminfo")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """What to check. By default everything, at a plain, an odd and a wide shape."""

    dtypes: tuple[Literal["fp32", "bf16", "fp16"], ...] = ("fp32", "bf16", "fp16")
    shapes: tuple[tuple[Tokens, Size, Vocabulary], ...] = ()
    """Tokens, hidden size and vocabulary of each, over all ranks. By default chosen by device."""
    schedules: tuple[ScheduleName, ...] = ("recompute", "cached", "in_forward", "auto")
    impl: Impl | None = None
    """By default what linear_cross_entropy chooses on this device."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Annotated[int, SEED] = 0
    output: Path | None = None
    """JSON file for all errors and budgets, the hardware and the versions."""
    quiet: bool = False
    """Print the worst case of each table, misses and the verdict, and no tables."""


def main(args: Sequence[str] | None = None) -> int:
    """Return 0 if every rank met every budget, else 1.

    Raises ``ConfigError`` for what cannot be checked, before anything is.
    """
    show_errors = launcher_number("RANK", alone=0) == 0
    check_values(sys.argv[1:] if args is None else args)
    settings = tyro.cli(
        Settings, prog="python -m flce_dist.launch.verify", args=args, description=__doc__,
        console_outputs=show_errors,
    )  # fmt: skip
    check_ranges(settings)
    for name in ("dtypes", "schedules"):
        require(bool(getattr(settings, name)), f"{name} must name at least one, got none")
    device_type = device_type_of(settings.device)
    if settings.output is not None and show_errors:
        check_writable(settings.output)
    started = time.monotonic()
    device, tp_group = start(device_type)
    _check_impl(settings.impl, device)
    rank, P = rank_and_size(tp_group)
    console = Console(quiet=rank != 0, width=None if sys.stdout.isatty() else 170)
    plain: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}

    records: list[Record] = []
    for of_table in _tables(settings, device, tp_group, console):
        of_table = worst_of_ranks(of_table, tp_group)
        console.print(worst_case(of_table), **plain)
        if not settings.quiet:
            console.print(table(of_table))
        records += of_table
    facts = {"ranks": P, **about(device), "seconds": round(time.monotonic() - started, 1)}
    console.print("\n".join(summary(records, facts)), **plain)
    has_passed = passed(records)
    if settings.output is not None and rank == 0:
        rows = [record.as_json() for record in records]
        write_json(settings.output, {**facts, "passed": has_passed, "records": rows})
    return 0 if has_passed else 1


def _check_impl(impl: Impl | None, device: torch.device) -> None:
    """Raise ``ConfigError`` for an implementation that this device does not have."""
    one = torch.zeros(1, 1, device=device)
    try:
        plan(one, one, torch.zeros(1, dtype=torch.int64, device=device), impl=impl)
    except NotImplementedError as error:
        raise ConfigError(str(error)) from error


def _tables(
    settings: Settings, device: torch.device, tp_group: Group, console: Console
) -> Iterator[list[Record]]:
    """Run every case, each rank its share of it; yield this rank's records table by table."""
    P = rank_and_size(tp_group)[1]
    grid = _grid(settings, device, P)
    _check_memory([shape for shape, _ in grid], device, tp_group)
    todo = [
        (dtype, shape, _cases_of(settings, DTYPES[dtype], shape, variants, P))
        for dtype in settings.dtypes
        for shape, variants in grid
    ]
    with Progress(console=console, transient=True, disable=settings.quiet) as progress:
        bar = progress.add_task("", total=sum(len(x) for *_, of_table in todo for x in of_table))
        for dtype, shape, of_table in todo:
            records = []
            for of_variant in of_table:
                variant = of_variant[0].variant
                data, truth = inputs_and_truths(
                    variant, shape, P, DTYPES[dtype], device, seed=settings.seed
                )
                for case in of_variant:
                    progress.update(bar, description=f"{dtype} {variant.name}: {case.name}")
                    record = Record(dtype, shape, case, {})
                    records.append(_checked(record, data, truth, tp_group, settings.impl))
                    progress.advance(bar)
            if records:
                yield records


def _checked(
    record: Record,
    data: Data,
    truth: Callable[[bool, float | None], Truth],
    tp_group: Group,
    impl: Impl | None,
) -> Record:
    """Return the record with the checks of its case, or with the error that hides no other case."""
    case = record.case
    try:
        expected = truth(case.metric_gradients, case.filter_eps)
        record = replace(record, checks=run_case(case, data, expected, tp_group, impl))
    except Exception as error:
        record = replace(record, failure=f"{type(error).__name__}: {error}")
    failures(record.failure and f"{record.where}: {record.failure}", tp_group)
    return record


def _grid(
    settings: Settings, device: torch.device, P: int
) -> list[tuple[cases.Shape, list[cases.Variant]]]:
    """Return the variants at each shape; filtered gradients have one of their own."""
    variants = [
        *cases.variants(),
        *cases.score_variants(),
        *cases.best_variants(),
        *cases.divergence_variants(),
    ]
    shapes = [cases.Shape(*sizes) for sizes in settings.shapes]
    grid = [(shape, variants) for shape in shapes or cases.default_shapes(device.type, P)]
    return [*grid, (cases.filtered_shape(P), cases.filtered_variants())]


def _cases_of(
    settings: Settings,
    dtype: torch.dtype,
    shape: cases.Shape,
    variants: list[cases.Variant],
    P: int,
) -> list[list[cases.Case]]:
    """Return the cases of one table, variant by variant, without those that have none."""
    budget = cases.part_cached_budget(shape, P, dtype)
    fitting = [x for x in variants if shape.H > 1 or not x.low_rank]  # cut from its columns
    of_variants = [list(cases.cases(x, settings.schedules, P, budget)) for x in fitting]
    return [of_variant for of_variant in of_variants if of_variant]


def _check_memory(shapes: list[cases.Shape], device: torch.device, tp_group: Group) -> None:
    """Raise ``ConfigError`` on every rank unless each shape fits into every rank's memory."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        available = re.search(r"MemAvailable: *(\d+) kB", MEMINFO.read_text())
        free = 1024 * int(available[1]) if available else 0
        free //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    least = int(reduced(torch.tensor(free, device=device), tp_group, dist.ReduceOp.MIN))
    for shape in shapes:
        T, H, V_all = shape
        needed = 8 * (10 * T * V_all + 6 * (T + V_all) * H)  # about ten logits, six of each operand
        gib = needed / 2**30
        free_gib = least / 2**30
        must = f"shapes must fit into memory: {tuple(shape)} needs {gib:.1f} GiB on each rank"
        require(needed < least, f"{must} for results in fp64, got {free_gib:.1f} GiB free")


if __name__ == "__main__":
    run_program(main)
