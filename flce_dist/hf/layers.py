"""Output layers that can be in a loss: an ``nn.Linear``, and what PEFT makes of one.

V vocabulary rows of this rank, H hidden size, r the rank of an adapter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from flce_dist.api import linear_cross_entropy
from flce_dist.hf.steps import Formula

OUTPUT_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
SPLITTING = (
    "torch.distributed.tensor.",
    "transformers.distributed.",
    "transformers.integrations.tensor_parallel",
)
"""Modules of tensor parallelism, whose hooks move what a layer gets and returns."""

WEIGHTS = (nn.Parameter, DTensor)
"""Types of a weight that nothing makes anew in each call, as pruning and FSDP1 do."""


class LayerOperands(NamedTuple):
    """What makes the logits [..., V] of a layer, and of LoRA on it."""

    hidden: Tensor  # [..., H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    low_rank: tuple[Tensor, Tensor] | None = None  # [..., r] and [V, r], of all adapters

    def logits(self) -> Tensor:
        z = F.linear(self.hidden, self.weight, self.bias)
        return z if self.low_rank is None else z + F.linear(*self.low_rank)


class PluggedLayer:
    """The first base of replaced output layers; the layer's own class is the second."""

    recording: Any = None  # the ``Recording`` of the model's forward that runs
    set_aside: Any = None  # the instance's own forward while ``computed`` runs

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_alone = len(args) == 1 and not kwargs
        if self.recording is None or not is_alone or passes_on(self):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return self.recording.logits_of(self, args[0])

    def forward(self: Any, *args: Any, compute: Any = None, **kwargs: Any) -> Any:
        if compute is not None:
            return compute(*args)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def called(self: Any, hidden: Tensor, compute: Callable[[Tensor], Any] | None = None) -> Any:
        """Call the layer with all its hooks; return its logits, or what ``compute`` does."""
        recording = self.recording
        self.recording = None
        try:
            if compute is None:
                return nn.Module.__call__(self, hidden)
            if hooks_of(self, OUTPUT_HOOKS, SPLITTING):  # they are for logits alone
                return compute(hidden)
            return self.computed(hidden, compute)
        finally:
            self.recording = recording

    def computed(self: Any, hidden: Tensor, compute: Callable[[Tensor], Any]) -> Any:
        """Call the layer with ``compute`` for the forward that tensor parallelism has given it."""
        # Not by pop, which Dynamo traces only from torch 2.13 on.
        own = vars(self)["forward"] if "forward" in vars(self) else None
        if own is not None:
            del self.forward
        self.set_aside = own
        try:
            return nn.Module.__call__(self, hidden, compute=compute)
        finally:
            self.set_aside = None
            if own is not None:
                self.forward = own

    def needs_its_hooks(self) -> bool:
        """Whether the weight exists in a call of the layer alone."""
        return isinstance(self, FSDPModule)

    def logits_in_its_call(self: Any, hidden: Tensor, operands: LayerOperands) -> Tensor:
        """Return the logits [..., V], while the layer's call computes a loss."""
        if adapters_of(self):
            return operands.logits()
        if hooks_of(self, OUTPUT_HOOKS, SPLITTING):
            return nn.Module.__call__(self, hidden)
        return (self.set_aside or super().forward)(hidden)  # type: ignore[misc]

    def logits_without_hooks(self: Any, hidden: Tensor, operands: LayerOperands) -> Tensor:
        """Return the logits [..., V] after a loss, in whose call the hooks have run."""
        if self.needs_its_hooks():
            raise NotImplementedError(
                "the model uses its logits after the loss, when FSDP2 has released the weight of "
                "the output layer; call the model with logits=True"
            )
        if adapters_of(self):
            return operands.logits()
        return vars(self).get("forward", super().forward)(hidden)  # type: ignore[misc]


def loss_of(
    operands: LayerOperands, labels: Tensor, formula: Formula, keywords: dict[str, Any]
) -> Tensor:
    """Return the loss of labels [T], a scalar or [T] by reduction."""
    hidden, weight, bias, low_rank = operands
    rows = formula.rows(hidden)
    if low_rank is not None:
        low_rank = formula.rows(low_rank[0]), low_rank[1]
    tokens = rows.shape[:-1]
    if labels.numel() != tokens.numel():
        raise ValueError(
            f"labels must be of the {tokens.numel()} tokens that have logits, got {labels.numel()}:"
            " pass labels of the shape of input_ids, and no logits_to_keep"
        )
    mesh: Any = getattr(weight, "device_mesh", None)
    is_split = isinstance(weight, DTensor) and weight.placements == (Shard(0),)
    loss = linear_cross_entropy(
        rows,
        weight,
        labels.view(tokens),
        softcap=formula.softcap,
        logit_scale=formula.scale,
        bias=bias if bias is None or formula.scale == 1.0 else bias * formula.scale,
        low_rank=low_rank,
        tp_group=mesh.get_group() if is_split else None,
        sequence_parallel=isinstance(rows, DTensor) and rows.placements == (Shard(1),),
        **keywords,
    )
    return loss.view(labels.shape) if loss.dim() else loss


def layers_of(head: Any) -> list[Any]:
    """Return the layers of which one makes the logits in a call of ``head``."""
    if hasattr(head, "modules_to_save"):
        return [head.original_module, *head.modules_to_save.values()]
    if hasattr(head, "token_adapter"):
        return [head.token_adapter, head.token_adapter.get_base_layer()]
    return [head]


def is_supported(layer: Any) -> bool:
    """Whether ``operands`` holds for the layer."""
    forward = getattr(type(layer), "replaced", type(layer)).forward
    place = (forward.__module__, forward.__qualname__)
    if place == ("peft.tuners.trainable_tokens.layer", "TrainableTokensLayer.forward"):
        return is_supported(layer.get_base_layer())
    if place == ("peft.tuners.lora.layer", "Linear.forward"):
        return is_supported(layer.get_base_layer())
    is_whole = type(getattr(layer, "weight", None)) in WEIGHTS
    return forward is nn.Linear.forward and is_whole


def passes_on(layer: Any) -> bool:
    """Whether a layer of trainable tokens only calls the layer below it."""
    if not hasattr(layer, "trainable_tokens_delta"):
        return False
    return bool(layer.disable_adapters or layer.merged or not layer.active_adapters)


def linear_of(layer: Any) -> Any:
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer


def adapters_of(layer: Any) -> list[str]:
    """Return the names of LoRA's active adapters that are not merged into the weight."""
    if not hasattr(layer, "lora_A") or layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def operands(layer: Any, hidden: Tensor) -> LayerOperands:
    """Return what makes the logits [..., V], once for all of its uses: LoRA's dropout is drawn."""
    if hasattr(layer, "trainable_tokens_delta"):  # PEFT leaves out the bias, too
        return LayerOperands(hidden, layer.get_merged_weights(layer.active_adapters), None)
    weight = linear_of(layer).weight
    bias = linear_of(layer).bias
    lows = []
    highs = []
    for name in adapters_of(layer):
        A = layer.lora_A[name]
        B = layer.lora_B[name]
        scaling = layer.scaling[name]
        low = A(layer.lora_dropout[name](hidden.to(A.weight.dtype))) * scaling
        lows.append(low.to(hidden.dtype))
        highs.append(B.weight.to(weight.dtype))
        if B.bias is not None:
            bias = B.bias * scaling + (0.0 if bias is None else bias)
    if bias is not None:  # that of an adapter may be fp32 beside a 16-bit weight
        bias = bias.to(weight.dtype)
    low_rank = (torch.cat(lows, -1), torch.cat(highs, 1)) if lows else None
    return LayerOperands(hidden, weight, bias, low_rank)


def hooks_of(module: Any, kinds: Any, places: tuple[str, ...] = ("",)) -> list[Any]:
    """Return hooks of these kinds, of functions whose modules begin with one of these names."""
    hooks = [hook for kind in kinds for hook in vars(module)[kind].values()]
    return [hook for hook in hooks if is_of(hook, places)]


def is_of(hook: Any, places: tuple[str, ...]) -> bool:
    """Whether a hook's function is of a module that begins with one of these names."""
    return (getattr(hook, "__module__", None) or "").startswith(places)
