"""The head alone (output layer and loss): its peak memory, and ours beside Megatron's.

Both take what the model gives its output layer for one batch. Gradients are returned, not
accumulated, and no generator is used: a run does not notice.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.launch.about import about, caption
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.launch.process_group import reduced
from flce_dist.launch.train.data import IGNORED
from flce_dist.launch.train.model import token_losses
from flce_dist.launch.write import write_figure, write_json
from flce_dist.memory import release_shared_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
TIMED_ROUNDS = 3
ROWS = (
    ("loss", "mean loss", ".6f"),
    ("loss_difference", "largest difference of a token's loss", ".1e"),
    ("dhidden_relative_rms", "difference of dhidden", ".1e"),
    ("dweight_relative_rms", "difference of dweight", ".1e"),
    ("time_ms", "time, ms", ".1f"),
    ("peak_mib", "peak memory, MiB", ".1f"),
)
"""Of the table: a head's number, its name and its format."""

Head = Callable[[], Tensor]
"""Returns the loss [b, s], or its sum; collective over the tensor-parallel group."""


class HeadResult(NamedTuple):
    loss: Tensor  # [b, s], or its sum
    dhidden: Tensor  # of the sum
    dweight: Tensor
    peak_bytes: int  # of the rank that needed most, the gradients included


class HeadAlone:
    """What reaches a model's output layer for one batch, and heads to compute its loss by.

    Making one, ``run`` and ``time_ms`` are collective over ``group``.

    Attributes:
        hidden: [s, b, H]; under sequence parallelism this rank's [s / P, b, H]. A leaf.
        weight: [V, H], this rank's rows of the output layer or of the tied embedding.
        labels: [b, s] int64, global ids.
    """

    def __init__(self, model: Any, tokens: Tensor, labels: Tensor, group: dist.ProcessGroup):
        self.model = model
        self.layer = model.output_layer
        self.labels = labels
        self.group = group
        calls: list[Any] = []
        handle = self.layer.register_forward_pre_hook(
            lambda layer, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
        with torch.no_grad():
            token_losses(model, tokens, labels)
        handle.remove()
        args, kwargs = calls[0]
        hidden = args[0] if args else kwargs["input_"]
        weight = kwargs.get("weight")
        self.hidden: Tensor = hidden.detach().clone().requires_grad_()
        self.weight: Tensor = self.layer.weight if weight is None else weight

    def ours(self, **changes: Any) -> Tensor:
        """Compute the loss by linear_cross_entropy with the model's keywords and some changes."""
        loss: Tensor
        loss, _ = self.layer.token_loss(self.hidden, self.weight, self.labels, **changes)
        return loss

    def megatrons(self) -> Tensor:
        """Compute it by ColumnParallelLinear and vocab_parallel_cross_entropy, or its fusion."""
        logits, _ = self.layer(self.hidden, self.weight)
        kind = type(self.model)
        loss: Tensor = kind.compute_language_model_loss(self.model, self.labels, logits)
        return loss.where(self.labels != IGNORED, 0.0)

    def run(self, head: Head) -> HeadResult:
        """Run forward and backward once, in memory that no other head has left."""
        release_shared_memory()
        with peak_memory(self.hidden.device) as peak:
            results = self._differentiate(head)
        peak_bytes = torch.tensor(peak.bytes + peak.shared_bytes, device=self.hidden.device)
        return HeadResult(*results, int(reduced(peak_bytes, self.group, dist.ReduceOp.MAX)))

    def time_ms(self, head: Head) -> float:
        """Return the time of one forward and backward, until the slowest rank is done."""
        self._wait_for_all()
        start = time.perf_counter()
        self._differentiate(head)
        self._wait_for_all()
        return (time.perf_counter() - start) * 1e3

    def _differentiate(self, head: Head) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients: added to the run's main_grad they would change it."""
        fuses = self.layer.gradient_accumulation_fusion
        self.layer.gradient_accumulation_fusion = False
        try:
            loss = head()
            dhidden, dweight = torch.autograd.grad(loss.sum(), (self.hidden, self.weight))
        finally:
            self.layer.gradient_accumulation_fusion = fuses
        return loss.detach(), dhidden, dweight

    def _wait_for_all(self) -> None:
        if self.hidden.device.type == "cuda":
            torch.cuda.synchronize(self.hidden.device)
        dist.barrier(self.group)


def head_peak_mib(alone: HeadAlone, *, is_ours: bool) -> float:
    """Return the peak memory of the model's own head; collective."""
    head = alone.ours if is_ours else alone.megatrons
    alone.run(head)  # makes the workspaces that libraries keep on a GPU
    return alone.run(head).peak_bytes / MIB


def compare_heads(alone: HeadAlone) -> dict[str, Any]:
    """Measure the heads; return what was measured and a record of each; collective.

    All ranks of the group get the same: ``{"about": {...}, "records": [...]}``.
    Ours runs twice: as the run had it, and with recompute in windows of a sixteenth of the logits,
    the other end of memory against time. Loss terms that Megatron does not have are left out.
    ``*_relative_rms`` is the norm of the difference from Megatron's gradient over the norm of that.
    """
    tokens = alone.labels.numel()
    rows, hidden_size = alone.weight.shape
    counted = int((alone.labels != IGNORED).sum())
    logits_bytes = tokens * rows * alone.weight.element_size()
    plain = partial(alone.ours, label_smoothing=0.0, z_loss_weight=0.0)
    small: dict[str, Any] = {"schedule": "recompute", "max_logits_bytes": logits_bytes // 16 or 1}
    heads: dict[str, Head] = {
        f"ours: {_named(**alone.layer.loss_keywords)}": plain,
        f"ours: {_named(**small)}": partial(plain, **small, reduction="none"),
        "Megatron": alone.megatrons,
    }
    results = {name: alone.run(head) for name, head in heads.items()}
    times_ms: dict[str, list[float]] = {name: [] for name in heads}
    for _ in range(TIMED_ROUNDS):  # in turns, so that a busy machine is busy for all
        for name, head in heads.items():
            times_ms[name].append(alone.time_ms(head))
    theirs = results["Megatron"]

    def relative_rms(a: Tensor, b: Tensor) -> float:
        squares = torch.stack([(a - b).double().square().sum(), b.double().square().sum()])
        difference, norm = reduced(squares, alone.group)
        return float((difference / norm).sqrt())

    def record(name: str, mine: HeadResult) -> dict[str, Any]:
        is_sum = mine.loss.dim() == 0
        return {
            "head": name,
            "loss": mine.loss.sum().item() / counted,
            "time_ms": statistics.median(times_ms[name]),
            "peak_mib": mine.peak_bytes / MIB,
            "loss_difference": None if is_sum else (mine.loss - theirs.loss).abs().max().item(),
            "dhidden_relative_rms": relative_rms(mine.dhidden, theirs.dhidden),
            "dweight_relative_rms": relative_rms(mine.dweight, theirs.dweight),
        }

    facts = {
        **about(alone.hidden.device),
        "dtype": str(alone.hidden.dtype).removeprefix("torch."),
        "tokens": tokens,
        "hidden_size": hidden_size,
        "rows_per_rank": rows,
        "ranks": alone.group.size(),
        "logits_mib": logits_bytes / MIB,
        "gradients_mib": (theirs.dhidden.nbytes + theirs.dweight.nbytes) / MIB,
    }
    return {"about": facts, "records": [record(name, mine) for name, mine in results.items()]}


def _named(schedule: str, max_logits_bytes: int | None, **others: Any) -> str:
    """Say by which schedule and in how much memory a head runs."""
    budget = "" if max_logits_bytes is None else f", {max_logits_bytes / MIB:.3g} MiB"
    return f"{schedule}{budget}"


def report_comparison(out_dir: Path, comparison: dict[str, Any]) -> None:
    """Print a table; write compare.json and compare.png."""
    from rich.console import Console
    from rich.table import Table

    facts = comparison["about"]
    heads = comparison["records"]
    title = f"Output layer and loss, forward + backward: {_shape(facts)} on {facts['hardware']}"
    table = Table(title=title, caption="differences are from Megatron's; relative RMS of gradients")
    table.add_column("")
    for head in heads:
        table.add_column(head["head"], justify="right")
    for key, label, form in ROWS:
        values = (head[key] for head in heads)
        table.add_row(label, *("" if value is None else format(value, form) for value in values))
    table.add_row("of it the gradients, MiB", *(f"{facts['gradients_mib']:.1f}" for _ in heads))
    Console().print(table)
    write_json(out_dir / "compare.json", comparison)
    write_figure(out_dir / "compare.png", comparison_figure(comparison), dpi=120)


def comparison_figure(comparison: dict[str, Any]) -> "Figure":
    """Draw peak memory and time of the heads; shape, hardware and commit below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    memory, times = figure.subplots(1, 2, sharey=True)
    facts = comparison["about"]
    heads = comparison["records"]
    for axes, key, label in (
        (memory, "peak_mib", "peak memory, MiB (dotted: the gradients alone)"),
        (times, "time_ms", "time of forward and backward, ms"),
    ):
        names = [head["head"].replace(": ", "\n") for head in heads]
        bars = axes.barh(names, [head[key] for head in heads], height=0.6)
        bars[-1].set_color("tab:gray")
        axes.bar_label(bars, fmt="{:,.1f}", padding=4, fontsize=8)
        axes.set_xlabel(label, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.25)
    memory.invert_yaxis()
    memory.axvline(facts["gradients_mib"], color="black", linestyle=":", linewidth=1)
    figure.suptitle("Output layer and loss of the trained model", fontsize=10)
    below = f"{_shape(facts)}\n{caption([facts], figure.get_figwidth())}"
    figure.supxlabel(below, fontsize=7, color="dimgray")
    return figure


def _shape(facts: dict[str, Any]) -> str:
    return (
        "{tokens} tokens, hidden {hidden_size}, {rows_per_rank} vocabulary rows on each of {ranks} "
        "ranks, {dtype}"
    ).format_map(facts)
