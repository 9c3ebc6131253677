"""What a run leaves to look at: progress bar, metrics.jsonl, TensorBoard events, loss curve.

For the one rank that reports.
"""

import sys
from pathlib import Path
from types import NoneType
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from flce_dist.launch.program import RunError
from flce_dist.launch.read import parse_json, read_bytes, regular
from flce_dist.launch.write import replacing, strict_json, write_figure, writing

METRICS = "metrics.jsonl"
CUT = "metrics.cut.jsonl"
RUN = "run.json"  # hardware, versions, command and configuration
KINDS = {"train": "-", "validation": "o-"}
"""Of records, and the style of each in the figure."""


class RunLog:
    """Writes one record per event, at once; null stands for numbers that are not finite.

    A run that continues at ``step``, perhaps beyond ``steps``, makes the steps beyond it again:
    their records are set aside, and TensorBoard leaves them out. An error in writing is kept until
    ``check``, so that the rank that writes goes on beside the others to where all stop.
    """

    def __init__(self, out_dir: Path, *, step: int, steps: int, head_mib: float):
        self.path = out_dir / METRICS
        self._failure: RunError | None = None
        with writing(self.path):
            cut = set_aside(self.path, step)
            self._file = open(self.path, "a", buffering=1, opener=regular)
            self._events = SummaryWriter(str(out_dir / "tensorboard"), purge_step=step + 1)
        self._head_mib = head_mib
        seconds = 0.5 if sys.stderr.isatty() else 10.0  # a log file wants few lines
        total = max(step, steps)
        self._bar = tqdm(
            total=total, initial=step, unit="step", dynamic_ncols=True, mininterval=seconds
        )
        if cut:
            lines = "line" if cut == 1 else "lines"
            moved = f"{cut} {lines} beyond step {step}, or damaged,"
            self.say(f"{moved} moved from {self.path} to {CUT}")

    def train(self, step: int, **values: float) -> None:
        """Record one training step; ``loss`` and ``tokens_per_s`` show in the bar."""
        self._write("train", step, values | {"head_peak_mib": self._head_mib})
        self._bar.set_postfix_str(
            f"loss {values['loss']:.4f}, {values['tokens_per_s']:.0f} tokens/s, "
            f"head {self._head_mib:.0f} MiB",
            refresh=False,
        )
        self._bar.update(step - self._bar.n)

    def validation(self, step: int, loss: float) -> None:
        self._write("validation", step, {"loss": loss})
        self.say(f"step {step}: validation loss {loss:.4f}")

    def say(self, message: str) -> None:
        """Print a line without tearing the progress bar."""
        self._bar.write(message)

    def check(self) -> None:
        """Raise ``RunError`` if a record could not be written."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the line of the progress bar: what is printed next begins a line of its own."""
        self._bar.close()
        try:
            with writing(Path(self._events.log_dir)):
                self._events.close()
        except RunError as error:  # kept, too: what has ended the run may be another
            self._failure = self._failure or error

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        line = strict_json({"kind": kind, "step": step, **values}, indent=None) + "\n"
        try:
            with writing(self.path, len(line)):
                self._file.write(line)
            with writing(Path(self._events.log_dir)):
                for name, value in values.items():
                    self._events.add_scalar(f"{kind}/{name}", value, step)
        except RunError as error:
            self._failure = self._failure or error


def set_aside(path: Path, step: int) -> int:
    """Move lines beyond ``step``, and those that are no records, to CUT; return their number."""

    def belongs(line: bytes) -> bool:
        record = record_in(line)
        return record is not None and record["step"] <= step

    lines = read_bytes(path).splitlines(keepends=True) if path.exists() else []
    cut = [line.rstrip(b"\n") + b"\n" for line in lines if not belongs(line)]
    if cut:
        with open(path.with_name(CUT), "ab", opener=regular) as file:
            file.write(b"".join(cut))
        with replacing(path) as scratch:
            scratch.write_bytes(b"".join(line for line in lines if belongs(line)))
    return len(cut)


def record_in(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line of ``metrics.jsonl``; None if it is damaged or cut short."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and record.get("kind") in [*KINDS]
    if not whole or type(record.get("step")) is not int or "loss" not in record:
        return None
    return record if isinstance(record["loss"], float | NoneType) else None


def plot_loss_curve(out_dir: Path) -> None:
    """Draw training and validation loss of ``metrics.jsonl`` over steps into loss.png.

    Raises ``RunError`` for a line that is no record.
    """
    from matplotlib.figure import Figure

    path = out_dir / METRICS
    records = []
    for number, line in enumerate(read_bytes(path).splitlines(keepends=True), start=1):
        record = record_in(line)
        if record is None:
            raise RunError(
                f"{path}:{number} must be a record of this run, got {line!r:.60}; the same command "
                f"moves it to {CUT} and draws the loss"
            )
        records.append(record)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for kind, style in KINDS.items():
        mine = [r for r in records if r["kind"] == kind and r["loss"] is not None]
        points = [(r["step"], r["loss"]) for r in mine]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=kind, linewidth=1.2, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    write_figure(out_dir / "loss.png", figure, dpi=120)
