"""The configuration of a benchmark: which shapes, which runs at each, how long, checked how.

A YAML file gives the values, the command line overrides them (``--rounds 3 --shapes.0.T 16``).
T = tokens, H = hidden size, V = whole vocabulary, P = ranks; each rank holds V / P rows.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from flce_dist.arguments.options import Kind, ScheduleName
from flce_dist.launch.bench.divergences import DIVERGENCES
from flce_dist.launch.bench.floors import FLOORS
from flce_dist.launch.bench.peers import PEERS, TOP_K_PEER
from flce_dist.launch.ranges import (
    BELOW_1,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    SIZE,
    SIZE_OR_0,
    UNIT,
)
from flce_dist.launch.yaml_config import check_ranges, from_command_line, require

Mode = Literal["forward", "forward_backward"]
Dtype = Literal["bf16", "fp16", "fp32"]
OURS = ("triton", "eager")


@dataclass(frozen=True)
class RunSpec:
    """One way to compute the loss, or a floor to measure it against."""

    impl: str = "triton"
    """triton or eager (ours), a floor of floors.py or a peer of peers.py."""
    schedule: ScheduleName = "auto"
    """Of ours; peers and floors have none."""
    max_logits_bytes: Annotated[int | None, COUNT] = None
    """Of ours, as linear_cross_entropy takes it."""
    mode: Mode = "forward_backward"
    """forward runs without gradients; floors have a mode of their own."""
    sequence_parallel: bool = False
    """Hidden is split by token over the ranks; one rank holds all of it."""
    filter_eps: Annotated[float | None, BELOW_1] = None
    """Of ours. It pays on the head of a trained model."""
    max_counted: bool = False
    """Of ours: it is told how many tokens count."""
    skip_ignored: bool = False
    frozen: bool = False
    """The weight needs no gradient, as with adapters elsewhere; the floor is then gemm2."""
    low_rank: Annotated[int, SIZE_OR_0] = 0
    """Of ours, frozen: so many columns of LoRA on the output layer are trained."""
    per_token: bool = False
    """Of ours: a loss for each token, with upstream gradients of their own."""
    over: Literal["vocabulary", "ids"] | None = None
    """Of ours: linear_logprob over these, and its ratio to the loss in place of a floor."""
    best: Literal["top_k", "rank", "sample"] | None = None
    """Of ours, forward: the best ids, the label's rank alone, or one drawn id of each token."""
    ids: Annotated[int, SIZE] = 1
    """Of each token, with over and best ids. With over the first is its label."""
    spread: Literal["uniform", "zipf", "one"] = "uniform"
    """Of the other ids over the vocabulary; one: the same id everywhere."""
    divergence: Kind | None = None
    """Of ours, and of peers of divergences.py: from a teacher with a head of the same size."""

    @property
    def is_ours(self) -> bool:
        return self.impl in OURS

    @property
    def has_gradients(self) -> bool:
        return self.mode == "forward_backward" and self.impl not in FLOORS

    @property
    def has_loss(self) -> bool:
        """Whether what the run returns can be compared with the loss."""
        return self.over != "ids" and self.best in (None, "rank")

    @property
    def name(self) -> str:
        """Short, and different for runs that differ."""
        words = [self.impl]
        if self.is_ours and self.mode == "forward_backward":
            words.append(self.schedule)
        if self.max_logits_bytes is not None:
            words.append(f"{self.max_logits_bytes / 2**20:g} MiB")
        if self.sequence_parallel:
            words.append("SP")
        if self.filter_eps is not None:
            words.append(f"eps {self.filter_eps:.2g}")
        flags = "max_counted", "skip_ignored", "frozen", "per_token"
        words += [name for name in flags if getattr(self, name)]
        if self.low_rank:
            words.append(f"low_rank {self.low_rank}")
        if self.over is not None:
            words.append(f"over {self.over} K={self.ids} {self.spread}")
        if self.best is not None:
            words.append(f"best K={self.ids}" if self.best == "top_k" else self.best)
        if self.divergence is not None:
            words.append(self.divergence)
        if self.mode == "forward" and self.impl not in FLOORS:
            words.append("forward")
        return " ".join(words)


@dataclass(frozen=True)
class ShapeSpec:
    """One problem."""

    T: Annotated[int, SIZE] = 1024
    H: Annotated[int, SIZE] = 4096
    V: Annotated[int, SIZE] = 128256
    dtype: Dtype = "bf16"
    flagged: Annotated[int, SEED] = 0
    """Tokens, evenly spread, whose label is so unlikely that their logits are computed twice."""
    counted: Annotated[float, UNIT] = 1.0
    """Share of the tokens that count; the others are ignored, by chance."""
    contiguous: bool = False
    """The ignored tokens are the first ones, all of the first ranks under sequence parallelism."""
    runs: tuple[RunSpec, ...] = ()
    """Runs at this shape in place of the common ones."""

    @property
    def problem(self) -> dict[str, Any]:
        """What tells shapes apart: all but the runs."""
        return {x.name: getattr(self, x.name) for x in dataclasses.fields(self) if x.name != "runs"}

    @property
    def title(self) -> str:
        """The name as figures have it."""
        return self.name.replace(" ", ", ")

    @property
    def name(self) -> str:
        flagged = f" flagged={self.flagged}" if self.flagged else ""
        counted = f" counted={self.counted:g}" if self.counted < 1 else ""
        contiguous = " contiguous" if self.contiguous else ""
        return f"T={self.T} H={self.H} V={self.V} {self.dtype}{flagged}{counted}{contiguous}"


@dataclass(frozen=True)
class BenchConfig:
    out: Path = Path("runs/bench/result")
    """Stem of the result files: out.json and out.csv."""
    fresh: bool = False
    """Measure everything again instead of going on after the shapes that the files have."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Annotated[int, SEED] = 0
    check: Literal["none", "loss", "gradients"] = "loss"
    """What to compare with fp64, once for each shape and run."""
    warmup: Annotated[int, SIZE] = 2
    """Calls of each run before anything is timed, at least 1: kernels compile in the first."""
    rounds: Annotated[int, SIZE] = 10
    """Samples of each run; the runs of one shape take turns."""
    sample_ms: Annotated[float, POSITIVE] = 20.0
    """A sample is as many calls back to back as take this long, and at least one."""
    settle_ms: Annotated[float, NOT_NEGATIVE] = 60.0
    """Untimed calls before each sample, since a card's clock follows its load with some delay."""
    cuda_graph: bool = False
    """Time replays of CUDA graphs, floors included: what remains if the host is not in the way."""
    profile: bool = False
    """Also write out.profile.json: each run's kernels, their times and bare communication."""
    trace: bool = False
    """Profile, and also write a trace of each run to look at: out.<shape>.<run>.trace.json.gz."""
    shapes: tuple[ShapeSpec, ...] = ()
    runs: tuple[RunSpec, ...] = ()
    head: Path | None = None
    """Measure on this head of a trained model, a file of torch.save, in place of random data."""
    widen: Annotated[int, SIZE] = 1
    """How many times the head's features are repeated, so that H grows and logits stay."""


def load_config(argv: list[str], *, world_size: int, show_errors: bool = True) -> BenchConfig:
    """Return the configuration of ``--config FILE [--overrides]``, checked."""
    config = from_command_line(
        BenchConfig, argv, show_errors=show_errors,
        prog="python -m flce_dist.launch.bench --config FILE",
        description="Time linear_cross_entropy, its floors and its peers, interleaved.",
    )  # fmt: skip
    check_config(config, world_size=world_size)
    return config


def check_config(config: BenchConfig, *, world_size: int) -> None:
    """Raise ``ConfigError`` for what cannot run on ``world_size`` ranks."""
    check_ranges(config)
    if config.head is not None:
        require(not config.shapes, "head has a shape of its own; shapes must name none")
        return
    require(bool(config.shapes), "shapes must name at least one shape, got none")
    names = [shape.name for shape in config.shapes]
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, f"shapes must name each shape once, got twice: {twice}")
    for shape in config.shapes:
        check_shape(shape, runs_of(config, shape), world_size)


def runs_of(config: BenchConfig, shape: ShapeSpec) -> list[RunSpec]:
    """Return the runs at ``shape``, the floors that they need among them, those first."""
    runs = shape.runs or config.runs
    needed = {run.impl if run.impl in FLOORS else floor_of(run) for run in runs}
    floors = [RunSpec(name, mode=floor.mode) for name, floor in FLOORS.items() if name in needed]
    return [*floors, *(run for run in runs if run.impl not in FLOORS)]


def floor_of(run: RunSpec) -> str:
    """Return what a run is measured against.

    The GEMMs that it needs: 1, or with gradients 3, or 4 if it recomputes logits; 2 with a frozen
    weight. Of scores the loss. Of a divergence, whose logits are two GEMMs, 2, 4 or 6.
    """
    if run.divergence is not None:
        if run.mode == "forward":
            return "gemm2_forward"
        return "gemm6" if run.is_ours and run.schedule == "recompute" else "gemm4"
    if run.over is not None:
        return dataclasses.replace(run, over=None, ids=1, spread="uniform").name
    if run.mode == "forward":
        return "gemm1"
    if run.frozen:
        return "gemm2"
    return "gemm4" if run.is_ours and run.schedule == "recompute" else "gemm3"


def as_json(config: BenchConfig) -> dict[str, Any]:
    """Return what decides the numbers: all but where they go."""
    values = dataclasses.asdict(config)
    values["head"] = None if config.head is None else config.head.name
    del values["out"], values["fresh"], values["profile"], values["trace"]
    return values


def check_shape(shape: ShapeSpec, runs: list[RunSpec], P: int) -> None:
    """Raise ``ConfigError`` for runs that are impossible at a shape on P ranks."""
    require(shape.V % P == 0, f"V must be divisible by the {P} ranks, got {shape.V}")
    require(shape.flagged <= shape.T, f"flagged must be at most T, got {shape.name}")
    require(bool(runs), f"runs must name at least one run for {shape.name}, got none")
    names = [run.name for run in runs]
    for run in runs:
        require(names.count(run.name) == 1, f"runs must differ, got {run.name!r} twice")
        if run.sequence_parallel:
            require(shape.T % P == 0, f"T must be divisible by the {P} ranks, got {shape.T}")
        _check_run(run, names, all_count=shape.counted == 1.0)


def _check_run(run: RunSpec, names: list[str], *, all_count: bool) -> None:
    """Check the options of a run, one of those of these names, at a shape where ``all_count``."""
    impls = [*OURS, *FLOORS, *PEERS, *DIVERGENCES]
    ours = f"of {' and '.join(OURS)}"
    got = f"got {run.name!r}"
    counts_all = all_count and not run.max_counted
    require(run.impl in impls, f"impl must be one of {', '.join(impls)}, got {run.impl!r}")
    if run.divergence is not None or run.impl in DIVERGENCES:
        computes_it = run.divergence is not None and (run.is_ours or run.impl in DIVERGENCES)
        is_alone = run.over is None and run.filter_eps is None
        require(
            computes_it and is_alone and counts_all,
            f"divergence names what triton, eager and peers of divergences compute, {got}",
        )
    if run.filter_eps is not None:
        is_schedule = run.is_ours and run.schedule == "auto"
        require(is_schedule, f"filter_eps is a schedule {ours}, {got}")
    if run.over is not None:
        computes_it = run.is_ours and run.filter_eps is None
        require(
            computes_it and counts_all,
            f"over is an option {ours}, whose every token counts, {got}",
        )
        loss = floor_of(run)
        require(loss in names, f"runs must have the loss {loss!r} beside {run.name!r}")
    if run.best is not None:
        computes_it = run.is_ours or run.impl == TOP_K_PEER
        is_alone = run.over is None and run.mode == "forward"
        require(
            computes_it and is_alone and all_count,
            f"best is of mode forward {ours}, whose every token counts, {got}",
        )
    if run.low_rank:
        is_trained = run.is_ours and run.frozen and run.mode == "forward_backward"
        is_mean = run.over is None and not run.per_token and run.filter_eps is None
        require(is_trained and is_mean, f"low_rank is of a mean {ours}, with frozen, {got}")
    for name in ("schedule", "max_logits_bytes", "max_counted", "skip_ignored", "per_token"):
        is_default = getattr(run, name) == getattr(RunSpec, name)
        require(run.is_ours or is_default, f"{name} is an option {ours}, {got}")
