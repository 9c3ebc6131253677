"""What an output layer returns while its model computes a loss: logits [..., V] yet to be made."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from flce_dist.api import linear_cross_entropy

_PRODUCTS, _QUOTIENTS = {"mul", "__mul__", "__rmul__"}, {"div", "__truediv__"}
_KNOWN = {Tensor.size, Tensor.dim} | {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "requires_grad", "grad_fn")
}  # needs no values
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_PARALLEL = ("torch.distributed.", "transformers.distributed.")  # their hooks only move tensors


class LazyLogits(Tensor):
    """Logits without values (on the meta device), and what the model has done to them.

    Steps are products and quotients with numbers, one tanh, ``float`` and the view [T, V]; a cross
    entropy contains them. Whatever else is asked of real logits; the loss then is theirs, too.
    """

    head: Any
    hidden: Tensor  # the layer's input [..., H]
    steps: tuple[Any, ...]
    scaling: tuple[float, float | None]  # logit_scale and softcap of the loss
    computed: dict[bool, Tensor]  # the real logits, by grad mode

    def made_of(self, head: Any, hidden: Tensor, steps: Any, scaling: Any) -> "LazyLogits":
        self.head, self.hidden, self.computed = head, hidden, {}
        self.steps, self.scaling = steps, scaling
        return self

    def scaling_after(self, name: str, others: list[Any]) -> tuple[float, float | None] | None:
        """Return ``scaling`` after a function of other arguments; None if it cannot be a step."""
        scale, softcap = self.scaling
        if name in _PRODUCTS | _QUOTIENTS and type(others[0]) in (int, float) and others[0] > 0:
            factor = others[0] if name in _PRODUCTS else 1 / others[0]
            return scale * factor, None if softcap is None else softcap * factor
        if name == "tanh" and softcap is None:
            return scale, 1.0
        is_flat = name == "view" and others == [-1, self.head.out_features]
        return self.scaling if is_flat or name == "float" else None

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
            elif not kwargs and (scaling := x.scaling_after(func.__name__, others)):
                found = super().__torch_function__(func, types, args)
                return found.made_of(x.head, x.hidden, (*x.steps, (func, *others)), scaling)
        why = f"the model asks for {func.__name__} of its logits"
        return func(*real(args, why), **{name: real(y, why) for name, y in kwargs.items()})


def real(x: Any, why: str) -> Any:
    """Return ``x`` with real logits for lazy ones, in lists and tuples too."""
    if isinstance(x, list | tuple):
        return type(x)([real(one, why) for one in x])
    if not isinstance(x, LazyLogits):
        return x
    if (mode := torch.is_grad_enabled()) not in x.computed:
        if x.head.is_lazy:
            x.head.warn(why)
        logits = nn.Module.__call__(x.head, x.hidden)
        for step, *others in x.steps:
            logits = step(logits, *others)
        x.computed[mode] = logits
    return x.computed[mode]


class FusedHead:
    """The first base of replaced output layers; the layer's own class is the second."""

    is_lazy = False  # set by the model while it computes its loss
    loss_keywords: dict[str, Any]

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_lazy or len(args) != 1 or kwargs:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        (hidden,), kind = args, args[0].device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        logits = torch.empty(*hidden.shape[:-1], self.out_features, dtype=dtype, device="meta")
        return logits.as_subclass(LazyLogits).made_of(self, hidden, (), (1.0, None))

    def may_be_lazy(self: Any, model: Any) -> bool:
        """Whether the loss of the model needs no real logits."""
        layer, adapters = linear_of(self), _adapters_of(self)
        hooks = [vars(x)["forward"] for x in (self, layer) if "forward" in vars(x)]
        hooks += [hook for x in (self, layer) for kind in _HOOKS for hook in vars(x)[kind].values()]
        of_others = [x for x in hooks if not getattr(x, "__module__", "").startswith(_PARALLEL)]
        variants = [getattr(self, "lora_variant", self.use_dora).get(x) for x in adapters]
        reasons = {
            "DataParallel gathers them": getattr(model, "_is_replica", False),
            "a hook of the output layer, or a forward of its own, may look at them": of_others,
            "its weight, with LoRA, is a DTensor": adapters and isinstance(layer.weight, DTensor),
            "its LoRA is a variant, such as DoRA": any(variants),
            "merged LoRA is disabled": layer is not self and self.merged and self.disable_adapters,
        }
        why = [why for why, holds in reasons.items() if holds]
        if why:
            self.warn(why[0])
        return not why

    def warn(self, why: str) -> None:
        """Say why the loss is that of real logits; raise if an option is lost on them."""
        for name in ("label_smoothing", "z_loss_weight", "vocab_size"):
            if x := self.loss_keywords.get(name):
                raise NotImplementedError(f"the loss of real logits does not apply {name}={x}")
        if not torch.compiler.is_compiling():
            warnings.warn(f"the loss is computed from real logits: {why}", stacklevel=3)

    def loss(self: Any, logits: LazyLogits, labels: Tensor, **options: Any) -> Tensor:
        """Return the loss of labels [T]; under FSDP2 as a call, whose hooks gather the weight."""

        def compute(hidden: Tensor) -> Tensor:  # [..., H]; LoRA of rank r makes that H + r
            whole, weight, bias = hidden, linear_of(self).weight, linear_of(self).bias
            for name in _adapters_of(self):
                A, B, scaling = self.lora_A[name], self.lora_B[name], self.scaling[name]
                low = A(self.lora_dropout[name](hidden.to(A.weight.dtype))) * scaling
                whole = torch.cat((whole, low.to(hidden.dtype)), dim=-1)
                weight = torch.cat((weight, B.weight.to(weight.dtype)), dim=-1)
                if B.bias is not None:
                    bias = B.bias * scaling + (0.0 if bias is None else bias)
            is_split = isinstance(weight, DTensor) and weight.placements == (Shard(0),)
            scale, softcap = logits.scaling
            return linear_cross_entropy(
                whole, weight, labels.view(hidden.shape[:-1]), softcap=softcap, logit_scale=scale,
                bias=bias if bias is None or scale == 1.0 else bias * scale,
                tp_group=weight.device_mesh.get_group() if is_split else None,
                sequence_parallel=isinstance(hidden, DTensor) and hidden.placements == (Shard(1),),
                **options, **self.loss_keywords,
            )  # fmt: skip

        if not isinstance(self, FSDPModule):
            return compute(logits.hidden)
        own = {"forward": vars(self)["forward"]} if "forward" in vars(self) else {}
        vars(self)["forward"] = compute
        try:
            return nn.Module.__call__(self, logits.hidden)
        finally:
            del vars(self)["forward"]
            vars(self).update(own)


def linear_of(head: Any) -> Any:
    return head.get_base_layer() if hasattr(head, "lora_A") else head


def _adapters_of(head: Any) -> list[str]:
    """Return the names of LoRA's active adapters that are not merged into the weight."""
    is_on = hasattr(head, "lora_A") and not (head.disable_adapters or head.merged)
    return [name for name in head.active_adapters if name in head.lora_A] if is_on else []
