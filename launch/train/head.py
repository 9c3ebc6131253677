"""The head alone (output layer and loss), ours and Megatron's, on the inputs the model gives it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import check_ranks
from flce_dist.launch.train.model import token_losses
from flce_dist.memory import peak_memory, release_shared_memory
from flce_dist.vocab_order import rows_of


@dataclass(frozen=True)
class HeadInput:
    """What reaches the output layer for one batch.

    Attributes:
        hidden: [s, b, H]; under sequence parallelism this rank's [s / P, b, H]. A leaf.
        weight: [V, H], this rank's rows of the output layer or of the tied embedding.
        labels: [b, s] int64, global ids.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor


Head = Callable[[Any, HeadInput], Tensor]
"""Takes the model and its input, returns the loss [b, s], or its sum."""


@dataclass(frozen=True)
class HeadResult:
    """Per-token loss [b, s] or its sum, this rank's gradients of the sum, and their memory.

    ``peak_bytes``, the gradients included, is that of the rank that needed most.
    """

    loss: Tensor
    dhidden: Tensor
    dweight: Tensor
    peak_bytes: int


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


def check_head(model: Any, given: HeadInput, group: dist.ProcessGroup) -> None:
    """Raise ValueError on every rank if the ranks' heads would not be called alike; collective."""
    layer = model.output_layer
    check_ranks(
        given.hidden,
        given.weight,
        given.labels.transpose(0, 1),
        tp_group=group,
        sequence_parallel=layer.sequence_parallel,
        **layer.loss_keywords,
    )


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


@contextmanager
def each_token(layer: Any) -> Iterator[None]:
    """Let a layer with head.schedule=in_forward return the loss of each token, for no_grad."""
    keywords = getattr(layer, "loss_keywords", None)
    if keywords is None or keywords["reduction"] == "none":
        yield
        return
    layer.loss_keywords = keywords | {"reduction": "none", "schedule": "auto"}
    try:
        yield
    finally:
        layer.loss_keywords = keywords


def run_head(head: Head, model: Any, given: HeadInput, group: dist.ProcessGroup) -> HeadResult:
    """Run forward and backward once; collective.

    Gradients are returned, not accumulated, and no generator is used: a run does not notice.
    """
    release_shared_memory()  # of other heads
    with peak_memory(given.hidden.device) as peak:
        loss = head(model, given)
        dhidden, dweight = torch.autograd.grad(loss.sum(), (given.hidden, given.weight))
    peak_bytes = torch.tensor(peak.bytes + peak.shared_bytes, device=given.hidden.device)
    dist.all_reduce(peak_bytes, dist.ReduceOp.MAX, group=group)
    return HeadResult(loss.detach(), dhidden, dweight, int(peak_bytes))


def time_head_ms(head: Head, model: Any, given: HeadInput, group: dist.ProcessGroup) -> float:
    """Return the time of one forward and backward, until the slowest rank is done; collective."""
    _wait_for_all(given.hidden.device, group)
    start = time.perf_counter()
    torch.autograd.grad(head(model, given).sum(), (given.hidden, given.weight))
    _wait_for_all(given.hidden.device, group)
    return (time.perf_counter() - start) * 1e3


def _wait_for_all(device: torch.device, group: dist.ProcessGroup) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier(group)
