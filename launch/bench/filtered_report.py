"""What the benchmark of filtered gradients found: a record for each run on a part, and a table."""

from dataclasses import dataclass

from rich.table import Table

from flce_dist.launch.bench.report import Record
from flce_dist.launch.bench.trained_head import Part


@dataclass(frozen=True)
class FilteredRecord(Record):
    """A run on one part; ``floor_ms`` is that of the three GEMMs."""

    order: str = "frequency"
    shards: int = 1
    shard: int = 0
    kept_share: float | None = None
    rank_one_mass: float | None = None
    rank_ms: tuple[float, ...] = ()  # kernels of each rank, without communication; of several


def table(records: list[FilteredRecord], part: Part) -> Table:
    """Return the table of one part."""
    first = records[0]
    ranks = f" on {first.P} ranks" if first.P > 1 else ""
    title = f"{part.name}: T={first.T} H={first.H} V={first.V} {first.dtype}{ranks}"
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
