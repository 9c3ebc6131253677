"""What a run leaves to look at: progress bar, metrics.jsonl, TensorBoard events, loss curve.

For the one rank that reports.
"""

import json
import sys
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

METRICS = "metrics.jsonl"


class RunLog:
    """Writes one record per event; a record is on disk (in the page cache) when ``write`` returns.

    A run that continues at ``step`` drops the records beyond it: those steps are made again.
    """

    def __init__(self, out_dir: Path, *, step: int, steps: int, head_mib: float):
        self.path = out_dir / METRICS
        keep = [record for record in read_metrics(self.path) if record["step"] <= step]
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(record) + "\n" for record in keep))
        scratch.rename(self.path)
        self._file = self.path.open("a", buffering=1)
        self._events = SummaryWriter(str(out_dir / "tensorboard"), purge_step=step + 1)
        self._head_mib = head_mib
        self._bar = tqdm(
            total=steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,  # seconds; a log file wants few
        )

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

    def close(self) -> None:
        self._bar.close()
        self._events.close()
        self._file.close()

    def _write(self, kind: str, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        for name, value in values.items():
            self._events.add_scalar(f"{kind}/{name}", value, step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of ``metrics.jsonl``; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last newline is unfinished


def plot_loss_curve(out_dir: Path) -> None:
    """Draw training and validation loss of ``metrics.jsonl`` over steps into loss.png."""
    from matplotlib.figure import Figure

    records = read_metrics(out_dir / METRICS)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for kind, style in (("train", "-"), ("validation", "o-")):
        points = [(r["step"], r["loss"]) for r in records if r["kind"] == kind]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=kind, linewidth=1.2, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out_dir / "loss.png", dpi=120)
