"""Time filtered gradients on the head of a trained model, beside exact ones and their GEMMs.

    python -m flce_dist.launch.bench.filtered --head head.pt --out runs/bench/filtered
    torchrun --nproc-per-node 2 -m flce_dist.launch.bench.filtered --head head.pt --out ...

``head.pt`` is what a training run writes with ``export_head``; its first 8192 tokens are timed. One
process measures the whole vocabulary in the order of frequency and in the tokenizer's, then the
first and the last shard of 4 and of 8, which ``trained_head`` simulates, and last the rows by
frequency (``rare_rows``), in all tokens. Several ranks split the vocabulary and, under sequence
parallelism, the tokens. Shards are timed as replays of CUDA graphs: the host of a rank is ahead of
its GPU in training, and behind it in calls as short as these. ``ratio`` is against the three GEMMs
of exact gradients on this rank's rows and all tokens. Records without time are the errors of
leaving tiles out of both gradients (impl ``dropped``) or of dhidden alone (``dropped_dhidden``).
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
from torch import Tensor

from flce_dist.launch.about import about
from flce_dist.launch.bench import rare_rows
from flce_dist.launch.bench.config import BenchConfig, RunSpec, ShapeSpec
from flce_dist.launch.bench.files import with_suffix
from flce_dist.launch.bench.filtered_report import FilteredRecord, table
from flce_dist.launch.bench.measure import Measured, free_memory, over_ranks
from flce_dist.launch.bench.problem import DTYPES, Errors, Truth, make_truth
from flce_dist.launch.bench.report import make_records
from flce_dist.launch.bench.trained_head import (
    Part,
    PartProblem,
    TrainedHead,
    differentiated,
    dropped,
    make_part,
)
from flce_dist.launch.process_group import start
from flce_dist.launch.write import check_writable, write_json
from flce_dist.launch.yaml_config import SIZE, ConfigError, check_ranges
from flce_dist.options import POSITIVE
from flce_dist.testing import relative_rms
from flce_dist.vocab_order import TILE

EPS = (2.0**-12, 2.0**-10)


@dataclass(frozen=True)
class Settings:
    head: Path
    """A file that a training run wrote with export_head."""
    out: Path = Path("runs/bench/filtered")
    """Stem of the result file, out.json."""
    widen: Annotated[int, SIZE] = 4
    """How many times features are repeated; at least 2 for shards."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    rounds: Annotated[int, SIZE] = 5
    sample_ms: Annotated[float, POSITIVE] = 60.0
    settle_ms: Annotated[float, POSITIVE] = 60.0


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
    batches = TrainedHead.load(settings.head, device).batches()
    head, P = batches[0], 1 if tp_group is None else tp_group.size()
    parts = _parts(head, settings, P)
    console = Console(quiet=tp_group is not None and tp_group.rank() > 0, width=140)
    records: list[FilteredRecord] = []
    facts = {
        "command": shlex.join(["python", "-m", "flce_dist.launch.bench.filtered", *sys.argv[1:]]),
        "ranks": P,
        **about(device),
        "config": {**dataclasses.asdict(settings), "head": settings.head.name, "out": None},
    }
    for part in parts:
        found = _measure(make_part(head, part, settings.widen, tp_group), part, settings)
        free_memory(device)
        records += found
        console.print(table(found, part))
        if not console.quiet:  # rank 0
            _write(path, facts, records=records)
    if P == 1:
        rows = rare_rows.measure(batches, EPS)
        console.print(rare_rows.table(rows))
        _write(path, facts, records=records, rows=rows)
    return 0


def _write(path: Path, facts: dict[str, Any], **records: list[Any]) -> None:
    lists = {name: [dataclasses.asdict(x) for x in found] for name, found in records.items()}
    write_json(path, {"about": facts, **lists})


def _parts(head: TrainedHead, settings: Settings, P: int) -> list[Part]:
    V_all, T = len(head.weight), len(head.labels)
    if P > 1:
        if V_all % P or T % P:
            raise ConfigError(f"{P} ranks must divide {V_all} rows and {T} tokens")
        return [Part()]
    whole = [Part(), Part("tokenizer")]
    if settings.widen == 1:
        return whole
    sizes = [shards for shards in (4, 8) if V_all % (shards * TILE) == 0]
    return whole + [Part("frequency", n, shard) for n in sizes for shard in (0, n - 1)]


def _runs(part: Part, problem: PartProblem) -> list[RunSpec]:
    """Return the runs on a part, the floor first."""
    inner = problem.problem
    impl = "triton" if inner.hidden.device.type == "cuda" else "eager"
    is_parallel = inner.tp_group is not None
    ours = [
        RunSpec(impl, "recompute", sequence_parallel=is_parallel),
        RunSpec(impl, "cached", sequence_parallel=is_parallel),
        *(RunSpec(impl, filter_eps=eps, sequence_parallel=is_parallel) for eps in EPS),
    ]
    peers = [] if is_parallel else [RunSpec("torch_eager")]
    return [RunSpec("gemm3"), *peers, *ours]


def _measure(given: PartProblem, part: Part, settings: Settings) -> list[FilteredRecord]:
    """Measure all runs on one part; collective."""
    problem, device = given.problem, given.problem.hidden.device
    config = BenchConfig(
        check="none",
        warmup=1,
        rounds=settings.rounds,
        sample_ms=settings.sample_ms,
        settle_ms=settings.settle_ms,
        cuda_graph=part.shards > 1 and device.type == "cuda",
    )
    (V, H), names = problem.weight.shape, {dtype: name for name, dtype in DTYPES.items()}
    shape = ShapeSpec(len(problem.labels), H, V * problem.P, names[problem.hidden.dtype])  # type: ignore[arg-type]
    truth = make_truth(problem, gradients=True)
    found = [Measured(run, problem, config) for run in _runs(part, given)]
    shares: dict[str, dict[str, Any]] = {}
    for measured in found:
        measured.prepare(None)
        run = measured.run
        if measured.failure is None and run.impl != "gemm3":
            loss, gradients, shares[run.name] = differentiated(problem, run)
            measured.errors = _errors(given, run, loss, gradients, truth)
            del gradients
        over_ranks(measured)
    without = _dropped(given, part, shape, truth)
    del truth
    free_memory(device)
    order = random.Random(config.seed)  # the same on all ranks
    for _ in range(config.rounds):
        for measured in order.sample(found, len(found)):
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
            **dataclasses.asdict(part),
            **shares.get(measured.run.name, {}),
            rank_ms=rank_ms[measured.run.name],
        )
        for record, measured in zip(records, found, strict=True)
    ]
    for measured in found:
        measured.release()
    return results + without


def _errors(
    given: PartProblem, run: RunSpec, loss: Tensor, gradients: tuple[Tensor, Tensor], truth: Truth
) -> Errors:
    dhidden, dweight = gradients
    assert truth.dhidden is not None and truth.dweight is not None
    tokens = given.problem.tokens_of(run)

    def of_model(d: Tensor) -> Tensor:
        return d[given.rows][:, given.columns]

    return Errors(
        abs(loss.item() - truth.loss) / abs(truth.loss),
        relative_rms(dhidden[:, given.columns], truth.dhidden[tokens][:, given.columns]),
        relative_rms(of_model(dweight), of_model(truth.dweight)),
    )


def _dropped(
    given: PartProblem, part: Part, shape: ShapeSpec, truth: Truth
) -> list[FilteredRecord]:
    """Return the errors of leaving tiles out: on the whole vocabulary, in one process."""
    problem = given.problem
    found = []
    for eps in EPS if part.shards == problem.P == 1 else ():
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
            order=part.order,
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


if __name__ == "__main__":
    run_program(main)
