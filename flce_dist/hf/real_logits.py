"""Why a forward needs real logits: what looks at them, or an output layer that makes others."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from flce_dist.hf.layers import (
    OUTPUT_HOOKS,
    SPLITTING,
    WEIGHTS,
    adapters_of,
    hooks_of,
    is_of,
    is_supported,
    layers_of,
    linear_of,
)

_INPUT_HOOKS = ("_forward_pre_hooks",)
_HARMLESS = (
    *SPLITTING,
    "torch.distributed.fsdp.",
    "torch.distributed._composable.",
    "torch.distributed._tools.",
    "torch.utils.module_tracker",
)
"""Modules whose hooks only move tensors or count calls; any other hook may look at logits."""

_WATCHED = "a hook of the output layer, or a forward of its own, may look at them"


def why_real(head: Any, around: list[nn.Module], *, is_replica: bool) -> str | None:
    """Return why a forward needs real logits; None if it does not.

    Args:
        head: the output layer, maybe in a wrapper of PEFT.
        around: the modules between the model and its head, whose output is logits, too.
        is_replica: whether the model is one of DataParallel's.
    """
    if is_replica:
        return "DataParallel gathers them"
    if _foreign_hooks_of(nn.modules.module, ["_global" + kind for kind in OUTPUT_HOOKS]):
        return "a hook of all modules may look at them"
    for module in around:
        if hooks_of(module, OUTPUT_HOOKS) or isinstance(module, FSDPModule):
            return f"a hook of {type(module).__name__}, around the output layer, may look at them"
    layers = layers_of(head)
    if head not in layers and _is_watched(head):
        return _WATCHED
    for layer in layers:
        why = why_layer_is_real(layer)
        if why is not None:
            return why
    return None


def why_layer_is_real(layer: Any) -> str | None:
    """Return why one of the head's layers must make its logits; None if it need not."""
    if not is_supported(layer):
        weight = type(getattr(linear_of(layer), "weight", None))
        unlike = "" if weight in WEIGHTS else f", whose weight is a {weight.__name__}"
        return f"the output layer is a {type(layer).__name__} of {type(layer).__module__}{unlike}"
    below = linear_of(layer)
    if _is_watched(layer):
        return _WATCHED
    if below is not layer and (_is_watched(below) or hooks_of(below, _INPUT_HOOKS)):
        return _WATCHED
    splits = hooks_of(layer, OUTPUT_HOOKS, SPLITTING)
    if splits and (isinstance(layer, FSDPModule) or _foreign_hooks_of(layer, _INPUT_HOOKS)):
        return "the output layer has hooks beside those of tensor parallelism"
    if not hasattr(layer, "lora_A"):
        return None
    if _has_hooks_of_keywords(layer):
        return "a hook may give its LoRA keywords, such as PEFT's adapter_names"
    adapters = adapters_of(layer)
    if adapters and isinstance(below.weight, DTensor):
        return "its weight, with LoRA, is a DTensor"
    variants = [getattr(layer, "lora_variant", layer.use_dora).get(name) for name in adapters]
    if any(variants):
        return "its LoRA is a variant, such as DoRA"
    if layer.merged and layer.disable_adapters:
        return "merged LoRA is disabled"
    return None


def _is_watched(layer: Any) -> bool:
    """Whether something but tensor parallelism and sharding sees what the layer returns."""
    own = vars(layer).get("forward")
    is_patched = own is not None and not is_of(own, SPLITTING)
    return is_patched or bool(_foreign_hooks_of(layer, OUTPUT_HOOKS))


def _has_hooks_of_keywords(layer: Any) -> bool:
    """Whether something but sharding may add keywords to a call of the layer."""
    hooks = vars(layer)["_forward_pre_hooks"]
    with_keywords = [hooks[key] for key in vars(layer)["_forward_pre_hooks_with_kwargs"]]
    return not all(is_of(hook, _HARMLESS) for hook in with_keywords)


def _foreign_hooks_of(module: Any, kinds: Any) -> list[Any]:
    """Return hooks of these kinds that may look at logits."""
    return [hook for hook in hooks_of(module, kinds) if not is_of(hook, _HARMLESS)]
