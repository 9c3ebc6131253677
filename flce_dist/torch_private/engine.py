"""The backward that runs, as autograd's engine knows it."""

from typing import Any

import torch
from torch import Tensor

from flce_dist.torch_private.lookup import needed


def keeps_graph() -> bool:
    """Whether the backward that runs may run again, as ``retain_graph`` says.

    Without it: yes, and gradients that in_forward has saved are copied before they are returned.
    """
    return getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)()


def is_wanted(node: Any) -> bool:
    """Whether the backward that runs computes the gradient that goes to this node of the graph.

    Without it: yes. With accumulate_dweight a backward for hidden alone then adds dweight, too.
    """
    try:
        return _is_executed(node)
    except RuntimeError:  # torch answers so about a leaf that torch.autograd.grad was asked for
        return True


def is_returned(node: Any) -> bool:
    """Whether ``torch.autograd.grad``, which runs, returns the gradient that goes to this node.

    Or what nodes of one input, such as casts and views, make of that. Not one of several inputs:
    their gradients are not in main_grad.

    Without it: no. With accumulate_dweight it then returns None, or zeros that share one element.
    """
    try:
        while _is_executed(node):
            behind = [before for before, _ in node.next_functions if before is not None]
            if behind and not any(map(is_wanted, behind)):
                return True  # it runs for its own sake
            if len(behind) != 1:
                return False
            node = behind[0]
    except RuntimeError:  # as above
        return True
    return False


def _is_executed(node: Any) -> bool:
    return getattr(torch._C, "_will_engine_execute_node", lambda node: True)(node)


def is_batched(x: Tensor) -> bool:
    """Whether is_grads_batched made this gradient. Without it: no, and torch's own error comes."""
    return getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: False)(x)


def backward_id() -> int:
    """Return the id of the backward that runs. Without it: an error."""
    return needed(torch._C, "_current_graph_task_id", "overwrite_main_grad")()
