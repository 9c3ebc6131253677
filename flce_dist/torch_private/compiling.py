"""What compilers make of functions and operators."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def keep_order(operator: Any) -> None:
    """Make compilers keep the order of calls of such operators (``torch._ops.OpOverload``).

    Without it: they keep it unless another takes less memory.
    """
    with suppress(ImportError, AttributeError):
        from torch._higher_order_ops import effects

        effects._register_effectful_op(operator, effects._EffectType.ORDERED)


def constant_in_graphs(function: _F) -> _F:
    """Let compiled code call the function once, while it is traced.

    As ``torch.compiler.assume_constant_result`` does, which imports Triton. Without it: the
    function is traced.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_exporting() -> bool:
    """Whether torch.export traces. Without torch's flag: never.

    Before torch 2.13 torch.compiler.is_exporting() is true under torch.compile, too.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def outside_graphs(function: Any, name: str) -> Any:
    """Return the function, which under torch.compile runs between two graphs.

    With fullgraph=True the error says so, by the ``name`` that the user knows, and under
    torch.export another one. Without the break the function is traced, without the flag of exports
    the error is that of fullgraph=True.
    """
    if not torch.compiler.is_compiling():
        return function
    if is_exporting():
        raise NotImplementedError(
            f"{name} is not part of a graph of torch.export; export what returns the hidden "
            f"states, and call {name} on these"
        )
    reason = (
        f"{name} is not part of a graph of torch.compile; use fullgraph=False, with which the "
        "graph ends before it and another one begins after it"
    )
    getattr(torch._dynamo, "graph_break", lambda msg: None)(msg=reason)
    return torch.compiler.disable(function)
