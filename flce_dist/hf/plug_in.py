"""``use_linear_cross_entropy``: where the plug-in meets a model of transformers.

The classes of model and output layer become subclasses. In a forward with labels the layer returns
``LazyLogits``, which note what the model does to them; their cross entropy contains that. So no
forward is copied, no config interpreted; parameters, state dicts, hooks and signatures stay.
"""

import functools
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from flce_dist.api import linear_cross_entropy
from flce_dist.hf.lazy_logits import LazyLogits, lazy_logits
from flce_dist.op import checks
from flce_dist.options import keywords_of

_FIXED: dict[str, Any] = dict(  # what the model decides, or the plug-in does not support
    reduction="mean", ignore_index=-100, softcap=None, logit_scale=1.0, vocab_range=None,
    sequence_parallel=False, sequence_dim=0, reduce_dhidden=True, accumulate_dweight=False,
)  # fmt: skip
_PARALLEL = ("torch.distributed.", "transformers.distributed.")  # their hooks only move tensors


class FusedHead:
    """The first base of replaced output layers; the layer's own class is the second."""

    is_lazy = False  # set by the model while it computes its loss
    loss_keywords: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_lazy and len(args) == 1 and not kwargs:
            return lazy_logits(self, args[0])
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def may_be_lazy(self: Any, model: Any) -> bool:
        """Whether the loss of the model needs no real logits."""
        layer, adapters = _linear_of(self), _adapters_of(self)
        hooks = [vars(x)["forward"] for x in (self, layer) if "forward" in vars(x)]
        for x in (self, layer):
            hooks += [*x._forward_hooks.values(), *x._forward_pre_hooks.values()]
            hooks += [*x._backward_hooks.values(), *x._backward_pre_hooks.values()]
        why = ""
        if getattr(model, "_is_replica", False):
            why = "DataParallel gathers them"
        elif not all(getattr(x, "__module__", "").startswith(_PARALLEL) for x in hooks):
            why = "a hook of the output layer, or a forward of its own, may look at them"
        elif adapters and isinstance(layer.weight, DTensor):
            why = "the weight of an output layer with LoRA is a DTensor"
        elif any(getattr(self, "lora_variant", self.use_dora).get(x) for x in adapters):
            why = "the LoRA of the output layer is a variant, such as DoRA"
        elif layer is not self and self.merged and self.disable_adapters:
            why = "the merged LoRA of the output layer is disabled"
        if why:
            self.warn(why)
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
            weight, bias = _linear_of(self).weight, _linear_of(self).bias
            inputs, rows = [hidden], [weight]
            for name in _adapters_of(self):
                A, B, scaling = self.lora_A[name], self.lora_B[name], self.scaling[name]
                low = A(self.lora_dropout[name](hidden.to(A.weight.dtype))) * scaling
                inputs, rows = [*inputs, low.to(hidden.dtype)], [*rows, B.weight.to(weight.dtype)]
                if B.bias is not None:
                    bias = B.bias * scaling + (0.0 if bias is None else bias)
            if len(inputs) > 1:
                hidden, weight = torch.cat(inputs, dim=-1), torch.cat(rows, dim=-1)
            is_split = isinstance(weight, DTensor) and weight.placements == (Shard(0),)
            scale, softcap = logits.scale_and_softcap()
            return linear_cross_entropy(
                hidden, weight, labels.view(hidden.shape[:-1]), softcap=softcap, logit_scale=scale,
                bias=bias if bias is None or scale == 1.0 else bias * scale,
                tp_group=weight.device_mesh.get_group() if is_split else None,
                sequence_parallel=isinstance(hidden, DTensor) and hidden.placements == (Shard(1),),
                **options, **self.loss_keywords,
            )  # fmt: skip

        if not isinstance(self, FSDPModule):
            return compute(logits.hidden)
        own = {name: x for name, x in vars(self).items() if name == "forward"}
        vars(self)["forward"] = compute
        try:
            return nn.Module.__call__(self, logits.hidden)
        finally:
            del vars(self)["forward"]
            vars(self).update(own)


def use_linear_cross_entropy(model: Any, **options: Any) -> Any:
    """Make a causal language model compute its loss by ``linear_cross_entropy``, and return it.

    Call it after ``get_peft_model``, before Trainer, accelerate, DDP, FSDP or torch.compile take
    the model; again to change options. With labels the model returns its loss as before (0, not
    NaN, if no label counts). Scale, softcap, bias, LoRA on the output layer and the tensor-parallel
    group are the model's. ``outputs.logits`` are computed when they are used. Logits with which a
    model does more, or that hooks see, are computed for its own loss; a warning says so.

    Args:
        model: a ``PreTrainedModel`` whose forward takes labels, or a ``PeftModel`` of one.
        **options: label_smoothing, z_loss_weight, vocab_size, reduce_in_fp32, tp_invariant,
            schedule, max_logits_bytes, max_counted, skip_ignored and impl, as in
            ``linear_cross_entropy``.

    Raises ValueError if an option is wrong, NotImplementedError if the model is wrapped, its output
    layer neither an ``nn.Linear`` nor LoRA on one, or its loss or forward of its own.
    """
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss

    checks.checked_options(**keywords_of(use_linear_cross_entropy, options, **_FIXED))
    base, found = _base_of(restore(model)), ""
    if not isinstance(base, PreTrainedModel):
        found = f"model must be a PreTrainedModel or PeftModel, got {type(base).__name__}"
    elif (head := _head_of(base)) is None or not _is_linear(head):
        found = f"the output layer must be an nn.Linear, or LoRA on one, got {head}"
    elif "labels" not in inspect.signature(base.forward).parameters or "forward" in vars(base):
        found = f"forward must be that of the class and take labels, got {base.forward}"
    elif base.loss_function is not ForCausalLMLoss:
        found = f"loss_function must be ForCausalLMLoss, got {base.loss_function}"
    if found:
        raise NotImplementedError(found)
    head.loss_keywords = options
    head.__class__ = _subclass(head.__class__, FusedHead)
    base.__class__ = _subclass(base.__class__)
    return model


def restore(model: Any) -> Any:
    """Undo ``use_linear_cross_entropy``, where it was called, and return the model."""
    base = _base_of(model)
    if "unfused" in vars(type(base)):
        for module in (_head_of(base), base):
            module.__class__ = vars(type(module)).get("unfused", type(module))
    return model


@functools.cache
def _subclass(base: Any, *mixin: Any) -> Any:
    """Return a class by the name of ``base``, a layer's with ``mixin`` or a model's."""
    names = ("__module__", "__qualname__", "__doc__")
    members = {"unfused": base, **{name: getattr(base, name) for name in names}}
    if not mixin:
        members["forward"] = _forward_of(base)
    return type(base.__name__, (*mixin, base), members)


def _forward_of(base: Any) -> Any:
    """Return the model's forward, with a lazy output layer if there are labels."""
    at = [*inspect.signature(base.forward).parameters].index("labels") - 1

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        head, labels = _head_of(self), args[at] if len(args) > at else kwargs.get("labels")
        if not isinstance(head, FusedHead):
            raise RuntimeError(
                "the output layer must be the one that use_linear_cross_entropy has replaced, got "
                f"another {type(head).__name__}; call it again, after get_peft_model"
            )
        head.is_lazy = labels is not None and head.may_be_lazy(self)
        try:
            return base.forward(self, *args, **kwargs)
        finally:
            head.is_lazy = False

    return forward


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _head_of(model: Any) -> Any:
    """Return the output layer, or peft's copy of it that is trained."""
    head = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies[head.active_adapters[0]]


def _linear_of(head: Any) -> Any:
    return head.get_base_layer() if hasattr(head, "lora_A") else head


def _is_linear(head: Any) -> bool:
    layer, lora = _linear_of(head), type(head).forward
    is_lora = (lora.__module__, lora.__qualname__) == ("peft.tuners.lora.layer", "Linear.forward")
    is_whole = type(getattr(layer, "weight", None)) in (nn.Parameter, DTensor)
    return type(layer).forward is nn.Linear.forward and is_whole and (is_lora or layer is head)


def _adapters_of(head: Any) -> list[str]:
    """Return the names of LoRA's active adapters that are not merged into the weight."""
    if not hasattr(head, "lora_A") or head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]
