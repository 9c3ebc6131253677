"""``use_linear_cross_entropy``: where the plug-in meets a model of transformers.

Model and output layer become subclasses. With labels the layer returns ``SymbolicLogits``, which
note what the model does to them, until the loss takes them. So no forward is copied and no config
interpreted. What the model returns has real logits or ``NO_LOGITS``.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flce_dist.arguments import values
from flce_dist.arguments.decided_once import checked_options
from flce_dist.arguments.options import TransformersOptions, keywords_of
from flce_dist.hf.layers import PluggedLayer, is_supported, layers_of
from flce_dist.hf.real_logits import why_real
from flce_dist.hf.symbolic import Recording

_FIXED: dict[str, Any] = dict(  # what the model decides, or the plug-in does not support
    reduction="mean",
    ignore_index=-100,
    softcap=None,
    logit_scale=1.0,
    vocab_range=None,
    sequence_parallel=False,
    sequence_dim=0,
    reduce_dhidden=True,
    accumulate_dweight=False,
)
OURS_ALONE = ("label_smoothing", "z_loss_weight", "vocab_size")
"""Options that change the loss, and that a model's own loss lacks."""

_COST = (
    "they and their fp32 copies take up to 12 bytes per token and vocabulary entry, as without the "
    "plug-in"
)


@dataclass
class Settings:
    """What the plug-in keeps in a model."""

    keywords: dict[str, Any]  # of ``linear_cross_entropy``
    logits: bool | None
    is_off: bool = False  # while the model's own loss is asked for
    warned: set[str] = field(default_factory=set)
    head: Any = None  # that ``around`` belongs to
    around: list[nn.Module] = field(default_factory=list)

    def warn(self, why: str) -> None:
        """Say once why logits are real; raise if an option is lost on them."""
        for name in OURS_ALONE:
            if self.keywords.get(name):
                raise NotImplementedError(
                    f"the loss of real logits does not apply {name}={self.keywords[name]}, and "
                    f"logits are real: {why}"
                )
        if torch.compiler.is_compiling() or why in self.warned:
            return
        self.warned.add(why)
        warnings.warn(f"the loss is computed from real logits: {why}; {_COST}", stacklevel=2)

    def modules_around(self, model: nn.Module, head: Any) -> list[nn.Module]:
        """Return the modules that contain the head, but for the model."""
        if self.head is not head:
            names = [name for name, module in model.named_modules() if module is head]
            parts = names[0].split(".") if names else []
            paths = [".".join(parts[:n]) for n in range(1, len(parts))]
            self.around = [model.get_submodule(path) for path in paths]
            self.head = head
        return self.around


def use_linear_cross_entropy(
    model: Any, *, logits: bool | None = None, **options: Unpack[TransformersOptions]
) -> Any:
    """Make a causal language model compute its loss by ``linear_cross_entropy``, and return it.

    Call it before Trainer, accelerate, DDP, FSDP or torch.compile take the model; again to change
    options. Adapters may come before or after it. With labels the model returns its loss as before
    (in training 0, not NaN, if no label counts). Scale, softcap, bias, LoRA and the tensor-parallel
    group are the model's. Logits with which a model does more, or that hooks see, are computed for
    its own loss; a warning says so, once.

    Args:
        model: a ``PreTrainedModel`` whose forward takes labels, or a ``PeftModel`` of one.
        logits: whether ``outputs.logits`` beside a loss are real, [..., V] with autograd, for one
            more GEMM and their memory. By default they are in ``eval()`` alone; in training
            ``NO_LOGITS``, which is no tensor and raises when it is used, stands for them. A call
            may say otherwise: ``model(..., logits=True)``. Without labels they are always real.
        **options: of ``linear_cross_entropy``: label_smoothing, z_loss_weight, vocab_size, impl,
            reduce_in_fp32, tp_invariant, schedule, max_logits_bytes, max_counted, skip_ignored.
            ignore_index, -100 by default, goes to a call: ``model(..., ignore_index=-1)``.

    Raises ValueError if an option is wrong, NotImplementedError if the model is wrapped, its output
    layer none of those that ``flce_dist.hf.layers`` knows, or its loss or forward of its own.

    Example::

        model = use_linear_cross_entropy(AutoModelForCausalLM.from_pretrained(name))
        loss = model(input_ids=ids, labels=ids).loss  # without logits
    """
    if "ignore_index" in options:
        raise TypeError(
            "use_linear_cross_entropy() got an unexpected keyword argument 'ignore_index'. Give "
            "tokens to leave out the label -100, or pass ignore_index to each call of the model"
        )
    checked_options(**keywords_of(use_linear_cross_entropy, options, **_FIXED))
    values.flag("logits", logits, optional=True)
    _check_kind(model)
    base = _base_of(model)
    _check_model(base)
    base.linear_cross_entropy = Settings({**options}, logits)
    head = base.get_output_embeddings()
    base.linear_cross_entropy.modules_around(base, head)
    _adopt(head)
    if not _is_ours(type(base).forward):
        base.__class__ = plugged_class(base.__class__, is_layer=False)
    return model


def restore(model: Any) -> Any:
    """Undo ``use_linear_cross_entropy``, where it was called, and return the model."""
    base = _base_of(model)
    if "linear_cross_entropy" in vars(base):
        del base.linear_cross_entropy
        for module in base.modules():
            if "replaced" in vars(type(module)):
                module.__class__ = type(module).replaced
    return model


def _is_ours(forward: Any) -> bool:
    """Whether a forward is the plug-in's, maybe in a wrapper of accelerate."""
    return getattr(inspect.unwrap(forward), "__module__", None) == __name__


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _class_names(layer: Any) -> str:
    """Return the classes of a layer and of those that it wraps, from the outside in."""
    names = [_class_name(layer)]
    while isinstance(getattr(layer, "base_layer", None), nn.Module):
        layer = layer.base_layer
        names.append(_class_name(layer))
    return " around ".join(names)


def _class_name(layer: Any) -> str:
    """Return the name of a layer's class, with its module if torch has one of that name."""
    name = type(layer).__name__
    place = type(layer).__module__
    is_torchs = place.startswith("torch.") or not hasattr(nn, name)
    return name if is_torchs else f"{name} of {place}"


def _check_kind(model: Any) -> None:
    from transformers import PreTrainedModel

    base = _base_of(model)
    if isinstance(base, PreTrainedModel):
        return
    inner = next((name for name in ("module", "_orig_mod") if hasattr(model, name)), None)
    way_out = ""
    if inner is not None:
        way_out = f": call it before the model is wrapped, or pass model.{inner}"
    elif type(base).__module__.startswith("megatron."):
        way_out = ": for a model of megatron-core there is flce_dist.megatron"
    elif isinstance(base, nn.Linear):
        way_out = ": pass the model, whose output layer the plug-in finds"
    raise NotImplementedError(
        f"model must be a PreTrainedModel or PeftModel, got {type(base).__name__}{way_out}"
    )


def _check_model(base: Any) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = base.get_output_embeddings()
    if head is None:
        raise NotImplementedError(
            f"model must have an output layer over the vocabulary, got a {type(base).__name__} "
            "without one: pass a model for causal language modelling (...ForCausalLM)"
        )
    if not all(map(is_supported, layers_of(head))):
        raise NotImplementedError(
            f"the output layer must be an nn.Linear, or LoRA on one, got {_class_names(head)}"
        )
    names = [*inspect.signature(base.forward).parameters]
    is_patched = "forward" in vars(base) and not _is_ours(base.forward)
    if "labels" not in names or is_patched:
        place = type(base).__name__
        way_out = ""
        if is_patched:
            place = "the instance"
            way_out = ": call it before others, such as accelerate, patch the model"
        raise NotImplementedError(
            "forward must be that of the class and name labels among its parameters, got that of "
            f"{place} with {', '.join(names)}{way_out}"
        )
    if base.loss_function is not ForCausalLMLoss:
        raise NotImplementedError(
            f"loss_function must be ForCausalLMLoss, got {base.loss_function}"
        )


def _adopt(head: Any) -> list[Any]:
    """Make the known layers of a head plugged ones, where they are not yet, and return these."""
    layers = [layer for layer in layers_of(head) if is_supported(layer)]
    for layer in layers:
        if not isinstance(layer, PluggedLayer):
            layer.__class__ = plugged_class(layer.__class__, is_layer=True)
    return layers


@functools.cache
def plugged_class(base: Any, *, is_layer: bool) -> Any:
    """Return the class that replaces ``base``, by the same name: of a layer, or of a model."""
    members = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {"replaced": base, "__reduce_ex__": _reduced}
    if is_layer:
        return type(base.__name__, (PluggedLayer, base), members)
    return type(base.__name__, (base,), {**members, "forward": _forward_of(base)})


def _reduced(self: Any, protocol: int) -> Any:
    """Pickle by the class that was replaced, which can be imported."""
    own = type(self)
    _, _, *state = super(own, self).__reduce_ex__(max(protocol, 2))
    return _blank, (own.replaced, issubclass(own, PluggedLayer)), *state


def _blank(base: Any, is_layer: bool) -> Any:
    made = plugged_class(base, is_layer=is_layer)
    return made.__new__(made)


def _with_an_item(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keywords whose divisor of the loss is 1 instead of 0: that of no label is then 0."""
    count = kwargs.get("num_items_in_batch")
    if count is None:
        return kwargs
    count = count.masked_fill(count == 0, 1) if isinstance(count, Tensor) else count or 1
    return {**kwargs, "num_items_in_batch": count}


def _forward_of(base: Any) -> Callable[..., Any]:
    """Return the model's forward, with symbolic logits if there are labels."""
    signature = inspect.signature(base.forward)
    place = [*signature.parameters].index("labels") - 1

    def forward(self: Any, *args: Any, logits: bool | None = None, **kwargs: Any) -> Any:
        values.flag("logits", logits, optional=True)
        labels = args[place] if len(args) > place else kwargs.get("labels")
        settings = getattr(self, "linear_cross_entropy", None)  # None: made by type(model)(config)
        if labels is None or settings is None or settings.is_off:
            return base.forward(self, *args, **kwargs)
        if self.training:
            kwargs = _with_an_item(kwargs)
        head = self.get_output_embeddings()
        around = settings.modules_around(self, head)
        why = why_real(head, around, is_replica=getattr(self, "_is_replica", False))
        if why is not None:
            settings.warn(why)
            return base.forward(self, *args, **kwargs)
        wanted = next(x for x in (logits, settings.logits, not self.training) if x is not None)
        recording = Recording(
            settings.keywords, settings.warn, wants_logits=wanted, is_training=self.training
        )
        layers = _adopt(head)
        outer = [layer.recording for layer in layers]  # of a forward that has called this one
        for layer in layers:
            layer.recording = recording
        try:
            return recording.finished(base.forward(self, *args, **kwargs))
        finally:
            recording.end()
            for layer, before in zip(layers, outer, strict=True):
                layer.recording = before

    # Without __wrapped__: accelerate calls what it finds there when it takes its own casts away.
    forward.__doc__ = base.forward.__doc__
    forward.__qualname__ = base.forward.__qualname__
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward
