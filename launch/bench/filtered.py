"""Time filtered gradients on the head of a trained model, beside exact ones and their GEMMs.

    python -m flce_dist.launch.bench.filtered --head head.pt --out runs/bench/filtered
    torchrun --nproc-per-node 2 -m flce_dist.launch.bench.filtered --head head.pt --out ...

``head.pt`` is a file of torch.save with ``hidden`` [T, H], ``labels`` [T] int64, ``weight``
[V_all, H] and ``counts`` [V_all] int64, how often each token occurs in the training text; its first
8192 tokens are timed. One process measures the vocabulary in the order of frequency and in the
tokenizer's. Several ranks split the vocabulary and, under sequence parallelism, the tokens.
``ratio`` is against the three GEMMs of exact gradients on this rank's rows and all tokens. Records
of one process without time are the errors of leaving tiles out of both gradients (impl ``dropped``)
or of dhidden alone (``dropped_dhidden``).
"""

from flce_dist.launch.program import run_program  # isort: skip  # before other packages

import dataclasses
import os
import random
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table

from flce_dist.launch.about import about
from flce_dist.launch.bench.config import BenchConfig, RunSpec, ShapeSpec
from flce_dist.launch.bench.files import with_suffix
from flce_dist.launch.bench.measure import Measured, free_memory, over_ranks
from flce_dist.launch.bench.problem import DTYPES, Problem, Truth, errors_of, make_truth
from flce_dist.launch.bench.report import Record, make_records
from flce_dist.launch.bench.trained_head import (
    Order,
    TrainedHead,
    differentiated,
    dropped,
    make_problem,
)
from flce_dist.launch.process_group import start
from flce_dist.launch.write import check_writable, write_json
from flce_dist.launch.yaml_config import SIZE, ConfigError, check_ranges
from flce_dist.options import POSITIVE
from flce_dist.testing import relative_rms

EPS = (2.0**-12, 2.0**-10)
TIMED_T = 8192


@dataclass(frozen=True)
class Settings:
    head: Path
    """A file of torch.save with hidden, labels, weight and counts."""
    out: Path = Path("runs/bench/filtered")
    """Stem of the result file, out.json."""
    widen: Annotated[int, SIZE] = 4
    """How many times features are repeated."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    rounds: Annotated[int, SIZE] = 5
    sample_ms: Annotated[float, POSITIVE] = 60.0
    settle_ms: Annotated[float, POSITIVE] = 60.0


@dataclass(frozen=True)
class FilteredRecord(Record):
    """A run in one order; ``floor_ms`` is that of the three GEMMs."""

    order: str = "frequency"
    kept_share: float | None = None
    rank_one_mass: float | None = None
    rank_ms: tuple[float, ...] = ()  # kernels of each rank, without communication; of several


def main(args: list[str] | None = None) -> int:
    settings = tyro.cli(
        Settings, prog="python -m flce_dist.launch.bench.filtered", args=args, description=__doc__
    )
    check_ranges(settings)
    path = with_suffix(settings.out, ".json")
    if os.environ.get("RANK", "0") == "0":
        check_writable(path)
    is_cpu = settings.device == "cpu" or not torch.cuda.is_available()
    device, tp_group = start("cpu" if is_cpu else "cuda")
    head, P = TrainedHead.load(settings.head, device, TIMED_T), 1
    if tp_group is not None:
        P, V_all, T = tp_group.size(), len(head.weight), len(head.labels)
        if V_all % P or T % P:
            raise ConfigError(f"{P} ranks must divide {V_all} rows and {T} tokens")
    console = Console(quiet=tp_group is not None and tp_group.rank() > 0, width=140)
    records: list[FilteredRecord] = []
    facts = {
        "command": shlex.join(["python", "-m", "flce_dist.launch.bench.filtered", *sys.argv[1:]]),
        "ranks": P,
        **about(device),
        "config": {**dataclasses.asdict(settings), "head": settings.head.name, "out": None},
    }
    orders: tuple[Order, ...] = ("frequency", "tokenizer") if P == 1 else ("frequency",)
    for order in orders:
        problem = make_problem(head, order, settings.widen, tp_group)
        found = _measure(problem, order, settings)
        free_memory(device)
        records += found
        console.print(_table(found))
        if not console.quiet:  # rank 0
            _write(path, facts, records)
    return 0


def _write(path: Path, facts: dict[str, Any], records: list[FilteredRecord]) -> None:
    write_json(path, {"about": facts, "records": [dataclasses.asdict(x) for x in records]})


def _runs(problem: Problem) -> list[RunSpec]:
    """Return the runs on a problem, the floor first."""
    impl = "triton" if problem.hidden.device.type == "cuda" else "eager"
    is_parallel = problem.tp_group is not None
    ours = [
        RunSpec(impl, "recompute", sequence_parallel=is_parallel),
        RunSpec(impl, "cached", sequence_parallel=is_parallel),
        *(RunSpec(impl, filter_eps=eps, sequence_parallel=is_parallel) for eps in EPS),
    ]
    peers = [] if is_parallel else [RunSpec("torch_eager")]
    return [RunSpec("gemm3"), *peers, *ours]


def _measure(problem: Problem, order: Order, settings: Settings) -> list[FilteredRecord]:
    """Measure all runs in one order; collective."""
    device = problem.hidden.device
    config = BenchConfig(
        check="none",
        warmup=1,
        rounds=settings.rounds,
        sample_ms=settings.sample_ms,
        settle_ms=settings.settle_ms,
    )
    (V, H), names = problem.weight.shape, {dtype: name for name, dtype in DTYPES.items()}
    shape = ShapeSpec(len(problem.labels), H, V * problem.P, names[problem.hidden.dtype])  # type: ignore[arg-type]
    truth = make_truth(problem, gradients=True)
    found = [Measured(run, problem, config) for run in _runs(problem)]
    shares: dict[str, dict[str, Any]] = {}
    for measured in found:
        measured.prepare(None)
        run = measured.run
        if measured.failure is None and run.impl != "gemm3":
            loss, gradients, shares[run.name] = differentiated(problem, run)
            measured.errors = errors_of(run, loss, gradients, problem, truth)
            del gradients
        over_ranks(measured)
    without = _dropped(problem, order, shape, truth)
    del truth
    free_memory(device)
    turns = random.Random(config.seed)  # the same on all ranks
    for _ in range(config.rounds):
        for measured in turns.sample(found, len(found)):
            measured.sample()
    rank_ms = {x.run.name: _kernels_ms(x) for x in found}
    floor, *_ = records = make_records(shape, found)
    results = [
        FilteredRecord(
            **{
                **dataclasses.asdict(record),
                "floor_ms": floor.p50_ms,
                "ratio": record.p50_ms and floor.p50_ms and record.p50_ms / floor.p50_ms,
            },
            order=order,
            **shares.get(measured.run.name, {}),
            rank_ms=rank_ms[measured.run.name],
        )
        for record, measured in zip(records, found, strict=True)
    ]
    for measured in found:
        measured.release()
    return results + without


def _dropped(
    problem: Problem, order: Order, shape: ShapeSpec, truth: Truth
) -> list[FilteredRecord]:
    """Return the errors of leaving tiles out, in one process."""
    found = []
    for eps in EPS if problem.P == 1 else ():
        dhidden, dweight, kept_share = dropped(problem, eps)
        assert truth.dhidden is not None and truth.dweight is not None
        record = FilteredRecord(
            op="linear_cross_entropy",
            impl="dropped",
            schedule=None,
            dtype="fp64",
            T=shape.T,
            V=shape.V,
            H=shape.H,
            P=1,
            mode="forward_backward",
            max_logits_bytes=None,
            sequence_parallel=False,
            dhidden_error=relative_rms(dhidden, truth.dhidden),
            dweight_error=relative_rms(dweight, truth.dweight),
            filter_eps=eps,
            order=order,
            kept_share=kept_share,
        )
        exact = dataclasses.replace(record, impl="dropped_dhidden", dweight_error=0.0)
        found += [record, exact]
    return found


def _kernels_ms(measured: Measured) -> tuple[float, ...]:
    """Return each rank's time in kernels that are no communication; collective."""
    group = measured.problem.tp_group
    if group is None or measured.problem.hidden.device.type == "cpu":
        return ()
    profile = measured.profile(None)
    mine = 0.0
    if profile is not None:
        mine = ((profile.products_us or 0.0) + (profile.other_us or 0.0)) / 1e3
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    return tuple(everyones)


def _table(records: list[FilteredRecord]) -> Table:
    first = records[0]
    ranks = f" on {first.P} ranks" if first.P > 1 else ""
    title = f"{first.order} order: T={first.T} H={first.H} V={first.V} {first.dtype}{ranks}"
    made = Table(title=title, caption="kept: share of tiles; left: mass in rank one")
    made.add_column("run", no_wrap=True)
    columns = {
        "ms": (".3f", "p50_ms"),
        "/ 3 GEMMs": (".3f", "ratio"),
        "kept": (".4f", "kept_share"),
        "left": (".4f", "rank_one_mass"),
        "workspace MiB": (",.1f", "workspace_mib"),
        "loss": (".1e", "loss_error"),
        "dhidden": (".5f", "dhidden_error"),
        "dweight": (".5f", "dweight_error"),
    }
    for heading in columns:
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("", overflow="fold")
    for record in records:
        values = ((form, getattr(record, name)) for form, name in columns.values())
        texts = ("" if x is None else format(x, form) for form, x in values)
        made.add_row(record.run.name, *texts, record.message or "")
    return made


if __name__ == "__main__":
    run_program(main)
