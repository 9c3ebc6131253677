"""``use_linear_cross_entropy``: where the plug-in meets a model of transformers.

Model and output layer become subclasses. With labels the layer returns ``LazyLogits``, which note
what the model does to them. So no forward is copied and no config interpreted.
"""

import functools
import inspect
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from flce_dist.arguments import checks
from flce_dist.arguments.options import keywords_of
from flce_dist.hf.lazy_logits import FusedHead, linear_of

_FIXED: dict[str, Any] = dict(  # what the model decides, or the plug-in does not support
    reduction="mean", ignore_index=-100, softcap=None, logit_scale=1.0, vocab_range=None,
    sequence_parallel=False, sequence_dim=0, reduce_dhidden=True, accumulate_dweight=False,
)  # fmt: skip


def use_linear_cross_entropy(model: Any, **options: Any) -> Any:
    """Make a causal language model compute its loss by ``linear_cross_entropy``, and return it.

    Call it after ``get_peft_model``, before Trainer, accelerate, DDP, FSDP or torch.compile take
    the model; again to change options. With labels the model returns its loss as before (0, not
    NaN, if no label counts); ``outputs.logits`` are computed when they are used. Scale, softcap,
    bias, LoRA and the tensor-parallel group are the model's. Logits with which a model does more,
    or that hooks see, are computed for its own loss; a warning says so.

    Args:
        model: a ``PreTrainedModel`` whose forward takes labels, or a ``PeftModel`` of one.
        **options: of ``linear_cross_entropy``: label_smoothing, z_loss_weight, vocab_size, impl,
            reduce_in_fp32, tp_invariant, schedule, max_logits_bytes, max_counted, skip_ignored.

    Raises ValueError if an option is wrong, NotImplementedError if the model is wrapped, its output
    layer neither an ``nn.Linear`` nor LoRA on one, or its loss or forward of its own.
    """
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss

    checks.checked_options(**keywords_of(use_linear_cross_entropy, options, **_FIXED))
    base, found = getattr(restore(model), "get_base_model", lambda: model)(), ""
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
    base = getattr(model, "get_base_model", lambda: model)()
    for module in (_head_of(base), base) if "unfused" in vars(type(base)) else ():
        module.__class__ = vars(type(module)).get("unfused", type(module))
    return model


@functools.cache
def _subclass(base: Any, *mixin: Any) -> Any:
    """Return a class by the name of ``base``, a layer's with ``mixin`` or a model's."""
    members = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {} if mixin else {"forward": _forward_of(base)}
    return type(base.__name__, (*mixin, base), {**members, "unfused": base})


def _forward_of(base: Any) -> Any:
    """Return the model's forward, with a lazy output layer if there are labels."""
    at = [*inspect.signature(base.forward).parameters].index("labels") - 1

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        head, labels = _head_of(self), args[at] if len(args) > at else kwargs.get("labels")
        if not isinstance(head, FusedHead):
            found = f"the output layer must be the replaced one, got another {type(head).__name__}"
            raise RuntimeError(f"{found}; call it again, after get_peft_model")
        head.is_lazy = labels is not None and head.may_be_lazy(self)
        try:
            return base.forward(self, *args, **kwargs)
        finally:
            head.is_lazy = False

    return forward


def _head_of(model: Any) -> Any:
    """Return the output layer, or peft's copy of it that is trained."""
    head = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies[head.active_adapters[0]]


def _is_linear(head: Any) -> bool:
    layer, lora = linear_of(head), type(head).forward
    is_lora = (lora.__module__, lora.__qualname__) == ("peft.tuners.lora.layer", "Linear.forward")
    is_whole = type(getattr(layer, "weight", None)) in (nn.Parameter, DTensor)
    return type(layer).forward is nn.Linear.forward and is_whole and (is_lora or layer is head)
