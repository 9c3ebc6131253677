"""What an output layer returns while its model computes a loss: logits [..., V] yet to be made."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LazyLogits:
    """The layer's input [..., H], and what the model has done to the logits since then.

    Products and quotients with numbers, one tanh and ``float`` are kept as steps, which the loss
    contains. Whatever else is asked for is asked of the real logits; the loss then is theirs, too.
    """

    def __init__(self, head: Any, hidden: Tensor, steps: tuple[Any, ...] = ()) -> None:
        self.head, self.hidden, self.steps = head, hidden, steps
        self.computed: dict[bool, Tensor] = {}  # by grad mode
        self.shape = torch.Size([*hidden.shape[:-1], head.out_features])
        self.device, kind = hidden.device, hidden.device.type
        is_cast = torch.is_autocast_enabled(kind)
        self.dtype = torch.get_autocast_dtype(kind) if is_cast else hidden.dtype
        if (Tensor.float,) in steps:
            self.dtype = torch.float32

    def scale_and_softcap(self) -> tuple[float, float | None]:
        """Return the options logit_scale and softcap of the loss."""
        scale, softcap = 1.0, None
        for step, *numbers in self.steps:
            for number in numbers:
                factor = number if step is torch.mul else 1 / number
                scale, softcap = scale * factor, None if softcap is None else softcap * factor
            softcap = 1.0 if step is torch.tanh else softcap
        return scale, softcap

    def real(self, why: str) -> Tensor:
        """Return the logits, computed as the model does; ``why``: what is asked of them."""
        mode = torch.is_grad_enabled()
        if mode not in self.computed:
            is_lazy, self.head.is_lazy = self.head.is_lazy, False
            if is_lazy:
                warn(f"the model asks for {why} of its logits")
            logits = self.head(self.hidden)
            self.head.is_lazy = is_lazy
            for step, *numbers in self.steps:
                logits = step(logits, *numbers)
            self.computed[mode] = logits
        return self.computed[mode]

    def _after(self, step: Callable[..., Any], *numbers: Any) -> Any:
        is_known = all(type(x) in (int, float) and x > 0 for x in numbers)
        if self.computed or not is_known or (step is torch.tanh and (step,) in self.steps):
            return step(self.real(step.__name__), *numbers)
        return LazyLogits(self.head, self.hidden, (*self.steps, (step, *numbers)))

    def __mul__(self, other: Any) -> Any:
        return self._after(torch.mul, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._after(torch.div, other)

    def tanh(self) -> Any:
        return self._after(torch.tanh)

    def float(self) -> Any:
        return self._after(Tensor.float)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real(name), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh and isinstance(args[0], LazyLogits):
            return args[0].tanh()
        name = func.__name__
        return func(*real(args, name), **{key: real(x, name) for key, x in (kwargs or {}).items()})


def _of_real_logits(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.real(name), name)(*args)


for _name in "add radd sub rsub rtruediv neg pow matmul getitem setitem iter eq ne lt gt".split():
    setattr(LazyLogits, f"__{_name}__", _of_real_logits(f"__{_name}__"))


class DeferredLogits(Tensor):
    """``LazyLogits`` in a model's output: a tensor whose values are computed when they are used."""

    lazy: LazyLogits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs or {})
        if func == Tensor.device.__get__:
            return args[0].lazy.device
        if func is Tensor.float:  # accelerate does that to all outputs
            return deferred(args[0].lazy.float())
        return LazyLogits.__torch_function__(func, types, real(args, func.__name__), kwargs)


_KNOWN = {Tensor.size, Tensor.dim} | {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "requires_grad", "grad_fn")
}
"""What is answered without values."""


def deferred(x: Any, training: bool = True) -> Any:
    """Return lazy logits as a tensor, in compiled training as they are; others as they are."""
    if not isinstance(x, LazyLogits):
        return x
    if torch.compiler.is_compiling():
        return x if training else x.real("values")
    tensor = torch.empty(x.shape, dtype=x.dtype, device="meta").as_subclass(DeferredLogits)
    tensor.lazy = x
    return tensor


def real(x: Any, why: str) -> Any:
    """Return ``x``, or the list or tuple ``x``, with real logits for lazy ones."""
    if isinstance(x, list | tuple):
        return type(x)([real(one, why) for one in x])
    x = x.lazy if isinstance(x, DeferredLogits) else x
    return x.real(why) if isinstance(x, LazyLogits) else x


def warn(why: str) -> None:
    if not torch.compiler.is_compiling():
        warnings.warn(f"the loss is computed from real logits: {why}", stacklevel=3)
