"""Our head against Megatron's own on one batch and the same weights: table, figure, numbers."""

import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.launch.about import about, caption
from flce_dist.launch.train.head import (
    Head,
    HeadResult,
    head_input,
    megatron_head,
    our_head,
    run_head,
    time_head_ms,
)
from flce_dist.launch.write import write_figure, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
TIMED_ROUNDS = 3


def compare_heads(
    model: Any, tokens: Tensor, labels: Tensor, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Measure the heads and return the numbers, the same on all ranks of ``group``; collective.

    Ours runs twice: as the run had it, and with recompute in windows of a sixteenth of the logits,
    the other end of memory against time, there without ``filter_eps``. Loss terms that Megatron
    does not have are left out.
    ``peak_mib`` is what forward and backward allocated at one time on the rank that needed most,
    the gradients included. ``*_relative_rms`` is the norm of the difference from Megatron's
    gradient over the norm of that, over all shards.
    """
    given = head_input(model, tokens, labels)
    rows = given.weight.shape[0]
    logits_bytes = labels.numel() * rows * given.weight.element_size()
    plain = partial(our_head, label_smoothing=0.0, z_loss_weight=0.0)
    heads: dict[str, Head] = {
        "linear_cross_entropy": plain,
        "with recompute": partial(
            plain,
            schedule="recompute",
            max_logits_bytes=max(1, logits_bytes // 16),
            filter_eps=None,
            reduction="none",
        ),
        "Megatron": megatron_head,
    }
    results = {name: run_head(head, model, given, group) for name, head in heads.items()}
    times_ms: dict[str, list[float]] = {name: [] for name in heads}
    for _ in range(TIMED_ROUNDS):  # in turns, so that a busy machine is busy for all
        for name, head in heads.items():
            times_ms[name].append(time_head_ms(head, model, given, group))

    theirs = results["Megatron"]
    gradients = (theirs.dhidden, theirs.dweight)
    return {
        **about(given.hidden.device),
        "dtype": str(given.hidden.dtype).removeprefix("torch."),
        "tokens": labels.numel(),
        "hidden_size": given.weight.shape[1],
        "rows_per_rank": rows,
        "ranks": group.size(),
        "logits_mib": logits_bytes / MIB,
        "gradients_mib": sum(grad.numel() * grad.element_size() for grad in gradients) / MIB,
        "heads": {
            name: {
                "loss": result.loss.sum().item() / labels.numel(),
                "time_ms": statistics.median(times_ms[name]),
                "peak_mib": result.peak_bytes / MIB,
                **_differences(result, theirs, group),
            }
            for name, result in results.items()
        },
    }


def print_table(numbers: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"Output layer and loss, forward + backward: {_shape(numbers)} on {numbers['hardware']}"
    table = Table(title=title, caption="differences are from Megatron's; relative RMS of gradients")
    table.add_column("")
    for name in numbers["heads"]:
        table.add_column(name, justify="right")
    for key, label, form in (
        ("loss", "mean loss", ".6f"),
        ("loss_difference", "largest difference of a token's loss", ".1e"),
        ("dhidden_relative_rms", "difference of dhidden", ".1e"),
        ("dweight_relative_rms", "difference of dweight", ".1e"),
        ("time_ms", "time, ms", ".1f"),
        ("peak_mib", "peak memory, MiB", ".1f"),
    ):
        values = (head[key] for head in numbers["heads"].values())
        table.add_row(label, *("" if value is None else format(value, form) for value in values))
    gradients = f"{numbers['gradients_mib']:.1f}"
    table.add_row("of it the gradients, MiB", *[gradients] * len(numbers["heads"]))
    Console().print(table)


def write_comparison(out_dir: Path, numbers: dict[str, Any]) -> None:
    """Write compare.json and compare.png."""
    write_json(out_dir / "compare.json", numbers)
    write_figure(out_dir / "compare.png", comparison_figure(numbers), dpi=120)


def comparison_figure(numbers: dict[str, Any]) -> "Figure":
    """Draw peak memory and time of the heads; shape, hardware and commit below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    memory, times = figure.subplots(1, 2, sharey=True)
    heads = numbers["heads"]
    for axes, key, label in (
        (memory, "peak_mib", "peak memory, MiB (dotted: the gradients alone)"),
        (times, "time_ms", "time of forward and backward, ms"),
    ):
        bars = axes.barh(list(heads), [head[key] for head in heads.values()], height=0.6)
        bars[-1].set_color("tab:gray")
        axes.bar_label(bars, fmt="{:,.1f}", padding=4, fontsize=8)
        axes.set_xlabel(label, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.25)
    memory.invert_yaxis()
    memory.axvline(numbers["gradients_mib"], color="black", linestyle=":", linewidth=1)
    figure.suptitle("Output layer and loss of the trained model", fontsize=10)
    below = f"{_shape(numbers)}\n{caption(numbers, figure.get_figwidth())}"
    figure.supxlabel(below, fontsize=7, color="dimgray")
    return figure


def _shape(numbers: dict[str, Any]) -> str:
    return (
        "{tokens} tokens, hidden {hidden_size}, {rows_per_rank} vocabulary rows on each of {ranks} "
        "ranks, {dtype}"
    ).format(**numbers)


def _differences(
    result: HeadResult, theirs: HeadResult, group: dist.ProcessGroup
) -> dict[str, float | None]:
    is_sum = result.loss.dim() == 0
    return {
        "loss_difference": None if is_sum else (result.loss - theirs.loss).abs().max().item(),
        "dhidden_relative_rms": _relative_rms(result.dhidden, theirs.dhidden, group),
        "dweight_relative_rms": _relative_rms(result.dweight, theirs.dweight, group),
    }


def _relative_rms(a: Tensor, b: Tensor, group: dist.ProcessGroup) -> float:
    squares = torch.stack([(a - b).double().square().sum(), b.double().square().sum()])
    dist.all_reduce(squares, group=group)
    return float((squares[0] / squares[1]).sqrt())
