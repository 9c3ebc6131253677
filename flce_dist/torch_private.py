"""Private names of torch: what each is for, and what happens in a torch that no longer has it.

No other file of the library uses one. They are looked up when they are needed, so that a missing
one costs only what it is for.
"""

from typing import Any

import torch
from torch import Tensor


def is_wanted(node: Any) -> bool:
    """Whether the backward that runs computes the gradient that goes to this node of the graph.

    Without it: yes. With accumulate_dweight a backward for hidden alone then adds dweight, too.
    """
    ask = getattr(torch._C, "_will_engine_execute_node", None)
    try:
        return ask is None or ask(node)
    except RuntimeError:  # it answers so about a leaf that torch.autograd.grad was asked for
        return True


def transforms() -> bool:
    """Whether a transform of torch.func is active. Without it: no, and torch's own error comes."""
    ask = getattr(torch._C, "_are_functorch_transforms_active", None)
    return ask is not None and ask()


def is_batched(x: Tensor) -> bool:
    """Whether is_grads_batched made this gradient. Without it: no, and torch's own error comes."""
    ask = getattr(torch._C._functorch, "is_legacy_batchedtensor", None)
    return ask is not None and ask(x)


def is_fsdp_parameter(x: Tensor) -> bool:
    """Whether FSDP2 has sharded this parameter. Without the list of modules: no, as far as known.

    Then an error about its placement does not name FSDP2.
    """
    try:
        from torch.distributed._composable_state import _module_state_mapping as modules
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        return False
    return any(
        parameter is x
        for module in list(modules)
        if isinstance(module, FSDPModule)
        for parameter in module.parameters()
    )
