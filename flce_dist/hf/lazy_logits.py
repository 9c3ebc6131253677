"""What an output layer returns while its model computes a loss: logits [..., V] yet to be made."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PRODUCTS, _QUOTIENTS = {"mul", "__mul__", "__rmul__"}, {"div", "__truediv__"}
_KNOWN = {Tensor.size, Tensor.dim} | {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "requires_grad", "grad_fn")
}  # needs no values


class LazyLogits(Tensor):
    """Logits without values (on the meta device), and what the model has done to them.

    Products and quotients with numbers, one tanh, ``float`` and the view [T, V] are kept as steps,
    which a cross entropy in the model contains. Whatever else is asked for is asked of the real
    logits; the loss then is theirs, too.
    """

    head: Any
    hidden: Tensor  # the layer's input [..., H]
    steps: tuple[Any, ...]
    computed: dict[bool, Tensor]  # the real logits, by grad mode

    def made_of(self, head: Any, hidden: Tensor, *steps: Any) -> "LazyLogits":
        self.head, self.hidden, self.steps, self.computed = head, hidden, steps, {}
        return self

    def scale_and_softcap(self) -> tuple[float, float | None]:
        """Return the options logit_scale and softcap of the loss."""
        scale, softcap = 1.0, None
        for step, *others in self.steps:
            if step.__name__ == "tanh":
                softcap = 1.0
            elif step.__name__ in _PRODUCTS | _QUOTIENTS:
                factor = others[0] if step.__name__ in _PRODUCTS else 1 / others[0]
                scale, softcap = scale * factor, None if softcap is None else softcap * factor
        return scale, softcap

    def keeps(self, name: str, others: list[Any]) -> bool:
        """Whether the function of this name, with other arguments, may become a step."""
        if name in _PRODUCTS | _QUOTIENTS:
            return type(others[0]) in (int, float) and others[0] > 0
        if name == "tanh":
            return not any(step.__name__ == name for step, *_ in self.steps)
        is_flat = name == "view" and others == [-1, self.head.out_features]
        return is_flat or name == "float"  # accelerate makes outputs float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs)
        if func == Tensor.device.__get__:
            return args[0].hidden.device
        x, *others = args or (None,)
        if isinstance(x, LazyLogits) and not x.computed:
            if func is F.cross_entropy and x.head.is_lazy and x.dim() == 2 and len(others) == 1:
                unset = ("label_smoothing", 0.0)
                given = {k: y for k, y in kwargs.items() if y is not None and (k, y) != unset}
                if given.keys() <= {"ignore_index", "reduction"} and others[0].dim() == 1:
                    return x.head.loss(x, others[0], **given)
            elif not kwargs and x.keeps(func.__name__, others):
                found = super().__torch_function__(func, types, args)
                return found.made_of(x.head, x.hidden, *x.steps, (func, *others))
        why = f"the model asks for {func.__name__} of its logits"
        return func(*real(args, why), **{name: real(y, why) for name, y in kwargs.items()})


def lazy_logits(head: Any, hidden: Tensor) -> LazyLogits:
    """Return what ``head`` makes of ``hidden`` [..., H]."""
    kind, shape = hidden.device.type, (*hidden.shape[:-1], head.out_features)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    logits = torch.empty(shape, dtype=dtype, device="meta").as_subclass(LazyLogits)
    return logits.made_of(head, hidden)


def real(x: Any, why: str) -> Any:
    """Return ``x`` with real logits for lazy ones, in lists and tuples too."""
    if isinstance(x, list | tuple):
        return type(x)([real(one, why) for one in x])
    if not isinstance(x, LazyLogits):
        return x
    mode = torch.is_grad_enabled()
    if mode not in x.computed:
        if x.head.is_lazy:
            x.head.warn(why)
        logits = nn.Module.__call__(x.head, x.hidden)
        for step, *others in x.steps:
            logits = step(logits, *others)
        x.computed[mode] = logits
    return x.computed[mode]
