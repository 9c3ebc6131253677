"""Who reads what an output layer returns: adapters, patches and hooks.

A fused layer returns a loss in place of logits, which only hooks of frameworks that gather and
release parameters bear. Forward pre-hooks see hidden states, so they are no reason for logits.
"""

import functools
import warnings
from typing import Any

from torch import nn

from flce_dist.torch_private.modes import hooks_of_all_modules

_FRAMEWORKS = (
    "torch.distributed.fsdp.",
    "torch.distributed._composable.",
    "torch.utils.module_tracker.",
    "megatron.core.distributed.",
    "megatron_fsdp.",
)
"""Modules whose hooks gather and release parameters, or only note which module runs."""


def reader_of_logits(head: nn.Module, layer: Any) -> str | None:
    """Return who reads the logits of ``layer``, as the end of a sentence; None for nobody.

    ``layer`` is a ``FusedLayer``; ``head`` the module that the model calls: that layer, what wraps
    it, or T5's own head.
    """
    changed = changed_forward(head, layer)
    if changed is not None:
        return changed
    for module in {head, layer}:
        kinds = module._forward_hooks, module._backward_hooks, module._backward_pre_hooks
        for hook in (hook for hooks in kinds for hook in hooks.values()):
            if not _is_of_framework(hook):
                return f"the hook {_name_of(hook)} is registered on it"
    for hook in hooks_of_all_modules():
        if not _is_of_framework(hook):
            return f"the hook {_name_of(hook)} is registered on all modules"
    return None


def changed_forward(head: nn.Module, layer: Any) -> str | None:
    """Return what makes logits from those of ``layer``, as the end of a sentence; or None."""
    if head is not layer and not is_head_of_t5(head):
        return f"it is wrapped in {type(head).__name__}"
    if "forward" in vars(layer) or "forward" in vars(head):
        return "its forward is patched"
    if type(layer).forward is not type(layer).own_forward:
        return f"it became a {type(layer).__name__}"
    return None


def is_head_of_t5(module: Any) -> bool:
    """Whether this is megatron-core's module that only calls its output layer."""
    return type(module).__name__ == "T5LMHead"


def warn(reader: str) -> None:
    """Warn that ``reader``, the end of a sentence, costs what the plug-in is for."""
    warnings.warn(
        f"model.output_layer makes the logits of all tokens, because {reader}; the loss is "
        "Megatron's own, of these logits, and saves no memory",
        stacklevel=2,
    )


def _name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def _is_of_framework(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', None)}.".startswith(_FRAMEWORKS)
