"""The head alone (output layer and loss): its peak memory, and ours beside Megatron's.

Both take what the model gives its output layer for one batch. Gradients are returned, not
accumulated, and no generator is used: a run does not notice.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import check_ranks
from flce_dist.launch.about import about, caption
from flce_dist.launch.train.model import token_losses
from flce_dist.launch.write import write_figure, write_json
from flce_dist.memory import peak_memory, release_shared_memory
from flce_dist.vocab_order import rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
TIMED_ROUNDS = 3


class HeadInput(NamedTuple):
    """What reaches the output layer for one batch."""

    hidden: Tensor  # [s, b, H], under sequence parallelism this rank's [s / P, b, H]; a leaf
    weight: Tensor  # [V, H], this rank's rows of the output layer or of the tied embedding
    labels: Tensor  # [b, s] int64, global ids


Head = Callable[[Any, HeadInput], Tensor]
"""Takes the model and its input, returns the loss [b, s], or its sum."""


class HeadResult(NamedTuple):
    loss: Tensor  # [b, s], or its sum
    dhidden: Tensor
    dweight: Tensor
    peak_bytes: int  # of the rank that needed most, the gradients included


def head_input(model: Any, tokens: Tensor, labels: Tensor) -> HeadInput:
    """Run the model and return what came into its output layer; collective."""
    caught: list[tuple[Tensor, Tensor]] = []

    def catch(layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        weight = kwargs.get("weight")
        hidden = args[0] if args else kwargs["input_"]
        caught.append((hidden, layer.weight if weight is None else weight))

    handle = model.output_layer.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with torch.no_grad():
            token_losses(model, tokens, labels)
    finally:
        handle.remove()
    hidden, weight = caught[0]
    return HeadInput(hidden.detach().clone().requires_grad_(), weight, labels)


def our_head(model: Any, given: HeadInput, **changes: Any) -> Tensor:
    """Compute the loss by linear_cross_entropy with the model's keywords and some changes."""
    layer = model.output_layer
    with _gradients_returned(layer):
        labels = given.labels.transpose(0, 1)
        loss = layer.token_loss(given.hidden, given.weight, labels, **changes)
    return loss.T if loss.dim() == 2 else loss


def megatron_head(model: Any, given: HeadInput) -> Tensor:
    """Compute the loss by ColumnParallelLinear and vocab_parallel_cross_entropy, or its fusion."""
    layer, labels = model.output_layer, given.labels
    rows = getattr(layer, "row_of_token", None)
    with _gradients_returned(layer):
        if rows is None:
            logits, _ = layer(given.hidden, given.weight)
        else:  # putting logits into the tokenizer's order is no part of Megatron's loss
            logits, _ = layer.row_logits(given.hidden, given.weight, None)
            labels = rows_of(labels, rows)
    return type(model).compute_language_model_loss(model, labels, logits)


@contextmanager
def _gradients_returned(layer: Any) -> Iterator[None]:
    """Without ``gradient_accumulation_fusion``, so that the run's main_grad stays as it is."""
    fuses, layer.gradient_accumulation_fusion = layer.gradient_accumulation_fusion, False
    try:
        yield
    finally:
        layer.gradient_accumulation_fusion = fuses


def head_peak_mib(
    model: Any, is_ours: bool, tokens: Tensor, labels: Tensor, group: dist.ProcessGroup
) -> float:
    """Return the peak memory of the model's own head on a batch; collective over ``group``.

    Raises:
        ValueError: on every rank, if the ranks' heads would not be called alike.
    """
    given, layer = head_input(model, tokens, labels), model.output_layer
    if is_ours:
        check_ranks(
            given.hidden,
            given.weight,
            labels.transpose(0, 1),
            tp_group=group,
            sequence_parallel=layer.sequence_parallel,
            **layer.loss_keywords,
        )
    head = our_head if is_ours else megatron_head
    run_head(head, model, given, group)  # makes the workspaces that libraries keep on a GPU
    return run_head(head, model, given, group).peak_bytes / MIB


def run_head(head: Head, model: Any, given: HeadInput, group: dist.ProcessGroup) -> HeadResult:
    """Run forward and backward once; collective."""
    release_shared_memory()  # of other heads
    with peak_memory(given.hidden.device) as peak:
        loss = head(model, given)
        dhidden, dweight = torch.autograd.grad(loss.sum(), (given.hidden, given.weight))
    peak_bytes = torch.tensor(peak.bytes + peak.shared_bytes, device=given.hidden.device)
    dist.all_reduce(peak_bytes, dist.ReduceOp.MAX, group=group)
    return HeadResult(loss.detach(), dhidden, dweight, int(peak_bytes))


def time_head_ms(head: Head, model: Any, given: HeadInput, group: dist.ProcessGroup) -> float:
    """Return the time of one forward and backward, until the slowest rank is done; collective."""

    def wait_for_all() -> None:
        if given.hidden.device.type == "cuda":
            torch.cuda.synchronize(given.hidden.device)
        dist.barrier(group)

    wait_for_all()
    start = time.perf_counter()
    torch.autograd.grad(head(model, given).sum(), (given.hidden, given.weight))
    wait_for_all()
    return (time.perf_counter() - start) * 1e3


def compare_heads(
    model: Any, tokens: Tensor, labels: Tensor, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Measure the heads and return the numbers, the same on all ranks of ``group``; collective.

    Ours runs twice: as the run had it, and with recompute in windows of a sixteenth of the logits,
    the other end of memory against time. Loss terms that Megatron does not have are left out.
    ``*_relative_rms`` is the norm of the difference from Megatron's gradient over the norm of that.
    """
    given = head_input(model, tokens, labels)
    rows = given.weight.shape[0]
    logits_bytes = labels.numel() * rows * given.weight.element_size()
    plain = partial(our_head, label_smoothing=0.0, z_loss_weight=0.0)
    small: dict[str, Any] = {
        "schedule": "recompute",
        "max_logits_bytes": max(1, logits_bytes // 16),
    }
    keywords = model.output_layer.loss_keywords
    heads: dict[str, Head] = {
        f"ours: {_named(**keywords)}": plain,
        f"ours: {_named(**small)}": partial(plain, **small, filter_eps=None, reduction="none"),
        "Megatron": megatron_head,
    }
    results = {name: run_head(head, model, given, group) for name, head in heads.items()}
    times_ms: dict[str, list[float]] = {name: [] for name in heads}
    for _ in range(TIMED_ROUNDS):  # in turns, so that a busy machine is busy for all
        for name, head in heads.items():
            times_ms[name].append(time_head_ms(head, model, given, group))

    theirs = results["Megatron"]

    def differences(mine: HeadResult) -> dict[str, float | None]:
        is_sum = mine.loss.dim() == 0
        return {
            "loss_difference": None if is_sum else (mine.loss - theirs.loss).abs().max().item(),
            "dhidden_relative_rms": _relative_rms(mine.dhidden, theirs.dhidden, group),
            "dweight_relative_rms": _relative_rms(mine.dweight, theirs.dweight, group),
        }

    return {
        **about(given.hidden.device),
        "dtype": str(given.hidden.dtype).removeprefix("torch."),
        "tokens": labels.numel(),
        "hidden_size": given.weight.shape[1],
        "rows_per_rank": rows,
        "ranks": group.size(),
        "logits_mib": logits_bytes / MIB,
        "gradients_mib": (theirs.dhidden.nbytes + theirs.dweight.nbytes) / MIB,
        "heads": {
            name: {
                "loss": result.loss.sum().item() / labels.numel(),
                "time_ms": statistics.median(times_ms[name]),
                "peak_mib": result.peak_bytes / MIB,
                **differences(result),
            }
            for name, result in results.items()
        },
    }


def _named(schedule: str, max_logits_bytes: int | None, **others: Any) -> str:
    """Say by which schedule and in how much memory a head runs."""
    filters = ", filtered" if others.get("filter_eps") is not None else ""
    budget = "" if max_logits_bytes is None else f", {max_logits_bytes / MIB:.3g} MiB"
    return f"{schedule}{filters}{budget}"


def _relative_rms(a: Tensor, b: Tensor, group: dist.ProcessGroup) -> float:
    squares = torch.stack([(a - b).double().square().sum(), b.double().square().sum()])
    dist.all_reduce(squares, group=group)
    return float((squares[0] / squares[1]).sqrt())


def report_comparison(out_dir: Path, numbers: dict[str, Any]) -> None:
    """Print a table; write compare.json and compare.png."""
    _print_table(numbers)
    write_json(out_dir / "compare.json", numbers)
    write_figure(out_dir / "compare.png", comparison_figure(numbers), dpi=120)


def _print_table(numbers: dict[str, Any]) -> None:
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
        names = [name.replace(": ", "\n") for name in heads]
        bars = axes.barh(names, [head[key] for head in heads.values()], height=0.6)
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
