"""What an output layer returns while its model computes a loss: logits [..., V] yet to be made."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

_PRODUCTS = {"mul", "__mul__", "__rmul__"}
_STEPS = _PRODUCTS | {"div", "__truediv__", "tanh", "float"}  # accelerate makes outputs float

_KNOWN = {Tensor.size, Tensor.dim} | {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "requires_grad", "grad_fn")
}  # needs no values


class LazyLogits(Tensor):
    """Logits without values (on the meta device), and what the model has done to them.

    Products and quotients with numbers, one tanh and ``float`` are kept as steps, which the loss
    contains. Whatever else is asked for is asked of the real logits; the loss then is theirs, too.
    """

    head: Any
    hidden: Tensor  # the layer's input [..., H]
    steps: tuple[Any, ...]
    computed: dict[bool, Tensor]  # the real logits, by grad mode

    def scale_and_softcap(self) -> tuple[float, float | None]:
        """Return the options logit_scale and softcap of the loss."""
        scale, softcap = 1.0, None
        for step, *numbers in self.steps:
            for number in numbers:
                factor = number if step.__name__ in _PRODUCTS else 1 / number
                scale, softcap = scale * factor, None if softcap is None else softcap * factor
            softcap = 1.0 if step.__name__ == "tanh" else softcap
        return scale, softcap

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs or {})
        if func == Tensor.device.__get__:
            return args[0].hidden.device
        x, *numbers = args or (None,)
        name = func.__name__
        if name in _STEPS and isinstance(x, LazyLogits) and not x.computed and not kwargs:
            is_second = name == "tanh" and any(step.__name__ == name for step, *_ in x.steps)
            if not is_second and all(type(n) in (int, float) and n > 0 for n in numbers):
                dtype = torch.float32 if name == "float" else x.dtype
                return lazy_logits(x.head, x.hidden, dtype, (*x.steps, (func, *numbers)))
        why = f"{name} of its logits"
        return func(*real(args, why), **{key: real(y, why) for key, y in (kwargs or {}).items()})


def lazy_logits(
    head: Any, hidden: Tensor, dtype: torch.dtype | None = None, steps: tuple[Any, ...] = ()
) -> LazyLogits:
    """Return what ``head`` and ``steps`` make of ``hidden`` [..., H]; None: in their dtype."""
    kind, shape = hidden.device.type, (*hidden.shape[:-1], head.out_features)
    if dtype is None:
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    logits = torch.empty(shape, dtype=dtype, device="meta").as_subclass(LazyLogits)
    logits.head, logits.hidden, logits.steps, logits.computed = head, hidden, steps, {}
    return logits


def real(x: Any, why: str) -> Any:
    """Return ``x`` with real logits for lazy ones, in lists and tuples too; warn with ``why``."""
    if isinstance(x, list | tuple):
        return type(x)([real(one, why) for one in x])
    if not isinstance(x, LazyLogits):
        return x
    mode = torch.is_grad_enabled()
    if mode not in x.computed:
        if x.head.is_lazy:
            warn(f"the model asks for {why}")
        logits = nn.Module.__call__(x.head, x.hidden)
        for step, *numbers in x.steps:
            logits = step(logits, *numbers)
        x.computed[mode] = logits
    return x.computed[mode]


def warn(why: str) -> None:
    if not torch.compiler.is_compiling():
        warnings.warn(f"the loss is computed from real logits: {why}", stacklevel=3)
