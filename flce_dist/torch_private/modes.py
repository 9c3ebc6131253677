"""What else sees a call: transforms of torch.func, fake tensors, tracers, hooks of all modules."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

transforms: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)
"""Whether a transform of torch.func is active. Without it: no, and torch's own error comes."""

FakeTensor: Any = getattr(getattr(torch, "_subclasses", None), "FakeTensor", ())
"""The class of tensors of FakeTensorMode. Without it: of none, and torch's own error comes."""

recorder: Callable[[], Any] = partial(
    getattr(torch._C, "_get_dispatch_mode", lambda key: None),
    getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "PROXY", None),
)
"""The mode of make_fx, also inside torch.func.linearize, or None. Without it: None, and torch's own
error comes."""

is_jit_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", lambda: False)
"""Whether torch.jit.trace is active. Without it: no, and torch's own error comes."""


def hooks_of_all_modules() -> list[Any]:
    """Return the forward and backward hooks of all modules. Without a name: none of its kind."""
    names = "_global_forward_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"
    kinds = (getattr(torch.nn.modules.module, name, {}) for name in names)
    return [hook for hooks in kinds for hook in hooks.values()]
