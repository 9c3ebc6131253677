"""What the benchmark found: one flat record for each run at a shape, and a table of them.

Times are in ms, memory in MiB. ``ratio`` is p50 over ``floor_ms``, the time of the GEMMs that the
run needs, or of the loss (``config.floor_of``). A forward run at few tokens reads the weight: where
``read_weight`` was measured and takes longer, it is the floor.
"""

import dataclasses
import math
import re
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from flce_dist.launch.bench.config import RunSpec, ShapeSpec, floor_of
from flce_dist.launch.bench.floors import FLOORS
from flce_dist.launch.bench.measure import Measured
from flce_dist.launch.bench.peers import Skipped
from flce_dist.launch.call_time import percentiles
from flce_dist.launch.process_group import rank_and_size

MIB = 2**20
_SKIPPED = f"{Skipped.__name__}: "
"""How the failure of a run begins that no rank could make."""
_ERRORS_BEFORE = re.compile("NotInstalled: |does not split the vocabulary over ranks$")
"""Of older files, in messages of errors that are skipped runs now."""
LOSS_BUDGET = 1e-4
"""Relative error that a loss may have, or one eps of its own dtype (bf16: 0.8 %) if more."""
GRADIENT_BUDGET = 2e-2
"""Relative RMS that a gradient may be off by where torch_eager, the yardstick, was not run, and
with filter_eps."""
TIMES_EAGER = 3.0
LEAST_GRADIENT_BUDGET = 1e-5
MOST_GRADIENT_BUDGET = 0.1
"""Whatever torch_eager's error is, which may be wrong itself: that of zeros is 1."""


@dataclass(frozen=True)
class Record:
    """A row of the result files. V is the whole vocabulary; P ranks hold V / P rows each."""

    op: str  # linear_cross_entropy, or floor
    impl: str
    schedule: str | None
    dtype: str
    T: int
    V: int
    H: int
    P: int
    mode: str
    max_logits_bytes: int | None
    sequence_parallel: bool
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    peak_mib: float | None = None  # above the inputs
    workspace_mib: float | None = None  # above inputs and gradients
    loss_error: float | None = None
    dhidden_error: float | None = None
    dweight_error: float | None = None
    floor_ms: float | None = None
    ratio: float | None = None
    status: str = "ok"  # ok, wrong, skipped or error
    message: str | None = None
    filter_eps: float | None = None
    kept_share: float | None = None  # of the tiles
    rank_one_mass: float | None = None  # of the probabilities
    counted: float = 1.0  # share of the tokens that are not ignored
    contiguous: bool = False  # the ignored tokens are the first ones
    flagged: int = 0  # tokens whose logits are computed twice
    max_counted: bool = False
    skip_ignored: bool = False
    frozen: bool = False  # the weight
    low_rank: int = 0  # columns that are trained
    per_token: bool = False  # a loss for each
    over: str | None = None  # of linear_logprob, as ids and spread
    best: str | None = None  # of linear_top_k and linear_sample
    ids: int = 1
    spread: str = "uniform"
    divergence: str | None = None  # of linear_divergence and its peers
    launches: float | None = None  # kernels of one call, if it was profiled

    @property
    def shape(self) -> ShapeSpec:
        """The problem, without its runs."""
        names = ShapeSpec().problem
        return ShapeSpec(**{name: getattr(self, name) for name in names})

    @property
    def is_skipped(self) -> bool:
        older = self.status == "error" and _ERRORS_BEFORE.search(self.message or "") is not None
        return older or self.status == "skipped"

    @property
    def is_failure(self) -> bool:
        """Whether a run of ours or a floor is wrong or failed; what a peer does is a result."""
        is_peer = self.impl not in FLOORS and not self.run.is_ours
        return not is_peer and self.status in ("wrong", "error")

    @property
    def run(self) -> RunSpec:
        """The run as the configuration had it."""
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(RunSpec)}
        return RunSpec(**{**fields, "schedule": self.schedule or "auto"})


FIELDS = [field.name for field in dataclasses.fields(Record)]


def make_records(shape: ShapeSpec, runs: list[Measured]) -> list[Record]:
    """Return the records of all runs at one shape."""
    measured = [x for x in runs if x.failure is None and x.samples_ms]
    p50_ms = {x.run.name: percentiles(x.samples_ms)[1] for x in measured}
    yardsticks = {
        x.run.divergence: x
        for x in measured
        if x.run.impl in ("torch_eager", "divergence_with_logits") and x.run.has_gradients
    }
    return [_make_record(shape, x, p50_ms, yardsticks.get(x.run.divergence)) for x in runs]


def _make_record(
    shape: ShapeSpec, measured: Measured, p50_ms: dict[str, float], eager: Measured | None
) -> Record:
    run = measured.run
    is_floor = measured.run.impl in FLOORS
    of_ours = "linear_logprob" if run.over is not None else "linear_cross_entropy"
    if run.best is not None:
        of_ours = "linear_sample" if run.best == "sample" else "linear_top_k"
    if run.divergence is not None:
        of_ours = "linear_divergence"
    facts = dataclasses.asdict(run) | {"op": "floor" if is_floor else of_ours}
    facts |= {"P": rank_and_size(measured.problem.tp_group)[1], **shape.problem}
    if not run.is_ours or run.mode == "forward":
        facts["schedule"] = None
    if measured.failure is not None:
        is_skipped = measured.failure.startswith(_SKIPPED)
        message = measured.failure.removeprefix(_SKIPPED)
        return Record(**facts, status="skipped" if is_skipped else "error", message=message)
    p20, p50, p80 = percentiles(measured.samples_ms)
    floor_ms = None if is_floor else p50_ms.get(floor_of(run))
    is_loss = run.over is None and run.divergence is None
    if floor_ms is not None and run.mode == "forward" and is_loss:
        floor_ms = max(floor_ms, p50_ms.get("read_weight", 0.0))
    peak = measured.peak_bytes
    complaint = _complaint(measured, eager)
    return Record(
        **facts,
        p20_ms=p20,
        p50_ms=p50,
        p80_ms=p80,
        peak_mib=None if peak is None else peak / MIB,
        workspace_mib=None if peak is None else (peak - measured.gradient_bytes) / MIB,
        **{f"{name}_error": error for name, error in vars(measured.errors).items()},
        **measured.filtered,
        floor_ms=floor_ms,
        ratio=None if floor_ms is None else p50 / floor_ms,
        status="ok" if complaint is None else "wrong",
        message=complaint,
    )


def _complaint(measured: Measured, eager: Measured | None) -> str | None:
    """Say what is wrong with a run's results; None if nothing is, or nothing was compared."""
    budgets = {"loss": max(LOSS_BUDGET, measured.loss_eps)}
    for name in ("dhidden", "dweight"):
        yardstick = None if eager is None else getattr(eager.errors, name)
        budgets[name] = GRADIENT_BUDGET
        if measured.run.filter_eps is None and yardstick is not None and math.isfinite(yardstick):
            budgets[name] = max(TIMES_EAGER * yardstick, LEAST_GRADIENT_BUDGET)
            budgets[name] = min(budgets[name], MOST_GRADIENT_BUDGET)
    for name, budget in budgets.items():
        error = getattr(measured.errors, name)
        if error is not None and not error <= budget:  # NaN is not
            return f"{name} is off by {error:.1e}, allowed {budget:.1e}"
    return None


COLUMNS = (
    ("ms", "p50_ms", ".3f"),
    ("p20", "p20_ms", ".3f"),
    ("p80", "p80_ms", ".3f"),
    ("/ floor", "ratio", ".3f"),
    ("workspace MiB", "workspace_mib", ",.1f"),
    ("loss", "loss_error", ".1e"),
    ("dhidden", "dhidden_error", ".1e"),
    ("dweight", "dweight_error", ".1e"),
    ("kept", "kept_share", ".4f"),
    ("rank one", "rank_one_mass", ".4f"),
)
"""Headings of a table between the run and its complaint, and the fields below them."""


def table(records: list[Record]) -> Table:
    """Return the table of one shape."""
    first = records[0]
    ranks = f" on {first.P} ranks" if first.P > 1 else ""
    made = Table(title=f"{first.shape.name}{ranks}")
    made.add_column("run", no_wrap=True)
    columns = COLUMNS if any(record.kept_share is not None for record in records) else COLUMNS[:-2]
    for heading, *_ in columns:
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("", overflow="fold")
    for before, record in zip([first, *records], records, strict=False):
        if record.op != before.op:
            made.add_section()
        values = [(getattr(record, field), form) for _, field, form in columns]
        cells = ["" if value is None else format(value, form) for value, form in values]
        made.add_row(escape(record.run.name), *cells, _remark(record))
    return made


def _remark(record: Record) -> str:
    """Return what a table says of a run that went wrong, or that could not be measured here."""
    if record.status == "ok":
        return ""
    style = "dim" if record.is_skipped else "red"
    return f"[{style}]{record.status}: {escape((record.message or '')[:120])}[/]"
