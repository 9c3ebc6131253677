"""``use_linear_cross_entropy``: where the plug-in meets the model.

Megatron's models build their output layer themselves; no spec can replace it. With labels they
call ``logits, _ = self.output_layer(hidden, weight=...)`` and then
``self.compute_language_model_loss(labels, logits)``, and multi-token prediction makes the same two
calls once per depth. While such a forward runs, a ``SymbolicHead`` stands in the model's
``output_layer``, and the method calls the layer itself, whose class is a subclass that returns the
loss. Everywhere else the layer returns real logits: without labels, in ``compute_mtp_single_step``,
for a user's ``output_processor`` and if somebody reads them (``watchers``). Parameters and state
dicts stay as they are.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from flce_dist.arguments import values
from flce_dist.arguments.options import KEYWORDS, LossOptions, MegatronOptions, keywords_of
from flce_dist.megatron import checks, watchers
from flce_dist.megatron.fused_layer import FusedLayer
from flce_dist.megatron.symbolic import HeadCall, SymbolicHead, check_result

_FIXED: dict[str, Any] = dict(
    sequence_parallel=False,
    sequence_dim=0,
    vocab_range=None,
    reduce_dhidden=True,
    reduce_in_fp32=False,
    tp_invariant=False,
    accumulate_dweight=False,
)
"""Options that the model decides or the output layer does not support."""

_FUSED = "megatron.core.transformer.linear_cross_entropy"
_signature = functools.cache(inspect.signature)


def use_linear_cross_entropy(
    model: Any, *, metrics: bool = False, **options: Unpack[MegatronOptions]
) -> Any:
    """Make ``model`` compute its loss by ``linear_cross_entropy``, and return it.

    Call it before the model is wrapped in Float16Module, DDP or FSDP, on every rank and pipeline
    stage: one without output layer is left as it is. Call it again to change options: those of the
    last call hold. With labels [b, s] the model returns the loss [b, s] fp32 as before. The
    tensor-parallel group, sequence parallelism, tied embeddings, MuP's scale and
    gradient_accumulation_fusion are the model's; its cross-entropy fusions are unused.

    Args:
        model: a ``GPTModel``, ``MambaModel``, ``HybridModel``, ``T5Model`` or a subclass; or a list
            of them, the pipeline stages of this rank.
        metrics: keep the ``LossWithMetrics`` [b, s] of the latest loss, detached, as
            ``model.output_layer.last_metrics``, which is None without it, and after a loss of
            real logits. With multi-token prediction: of the next token.
        **options: reduction, ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale,
            vocab_size, schedule, max_logits_bytes, max_counted, skip_ignored and impl,
            as in ``linear_cross_entropy``. Real logits have logit_scale and softcap applied, and
            keep the padding columns from ``vocab_size`` on. max_counted and skip_ignored look at
            labels, not at Megatron's loss_mask; with multi-token prediction max_counted must hold
            at each depth, where Megatron appends labels of 0. reduction is "none" by default; with
            "sum", which schedule="in_forward" needs, the model returns a scalar: for training loops
            that mask no token.

    Raises:
        ValueError: the model is wrapped or has no output layer, the layer is another model's, or
            an option is wrong.
        NotImplementedError: with defer_embedding_wgrad_compute, weights sharded by GTP, an output
            layer of another class (such as MXFP8's), a compute_language_model_loss of the model's
            own, schedule="in_forward" without reduction="sum", or that with multi-token prediction.

    Example::

        model = use_linear_cross_entropy(GPTModel(config, layer_spec, vocab_size, max_length))
        loss = model(ids, positions, None, labels=labels)  # [b, s], without logits
    """
    keywords = {"reduction": "none", **options}
    unchecked = LossOptions(**keywords_of(use_linear_cross_entropy, keywords, **_FIXED))
    values.flag("metrics", metrics)
    for stage in model if isinstance(model, list) else [model]:
        if isinstance(getattr(stage, "_modules", {}).get("module"), nn.Module):
            raise ValueError(
                f"model must be the model itself, got it wrapped in {type(stage).__name__}; call "
                "use_linear_cross_entropy before it is wrapped"
            )
        if getattr(stage, "post_process", True):
            _replace(stage, unchecked, keeps_metrics=metrics)
    return model


def _replace(model: Any, options: LossOptions, *, keeps_metrics: bool) -> None:
    layer: Any = getattr(model, "output_layer", None)
    has_options = isinstance(layer, FusedLayer) and checks.is_plugged(model)
    layer_class = type(layer) if has_options else replacement_of(model, layer)
    options = checks.checked_for_layer(options, layer)
    layer.loss_keywords = {name: getattr(options, name) for name in KEYWORDS if name not in _FIXED}
    layer.keeps_metrics = keeps_metrics
    layer.last_metrics = None
    layer.__class__ = layer_class
    if checks.is_plugged(model):  # with another output layer than now
        return
    # Bound by partial: copied and pickled with the model, which a method of an instance is not.
    model.compute_language_model_loss = functools.partial(language_model_loss, model)
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    model.register_forward_hook(_after_forward, prepend=True, always_call=True)


def replacement_of(model: Any, layer: Any) -> type:
    """Return the class that replaces that of the output layer; raise if none does."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from flce_dist.megatron import column_parallel

    checks.check_layer(model, layer)
    if type(layer) is ColumnParallelLinear:
        replacement: type = column_parallel.ColumnParallelLinear
    elif (type(layer).__module__, type(layer).__name__) == (_FUSED, "LinearCrossEntropyModule"):
        from flce_dist.megatron import linear_cross_entropy_module

        replacement = linear_cross_entropy_module.LinearCrossEntropyModule
    else:
        raise checks.unknown_class(layer)
    checks.check_model(model, layer)
    return replacement


def language_model_loss(model: Any, labels: Tensor, logits: Tensor | HeadCall) -> Tensor:
    """``compute_language_model_loss``: labels [b, s] to the loss [b, s] fp32, or to its sum.

    The loss of real logits is Megatron's, which knows none of our options.
    """
    if isinstance(logits, HeadCall):
        return logits.loss(labels)
    layer = checks.fused_layer(model._modules["output_layer"])
    checks.check_loss_of_logits(layer)
    layer.last_metrics = None
    return type(model).compute_language_model_loss(model, labels, logits)


def _before_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a ``SymbolicHead`` stand in if this call of the model has labels, or is for scores."""
    _end_of_symbols(model)  # of a forward that a signal ended
    name = "lm_head" if watchers.is_head_of_t5(model._modules.get("lm_head")) else "output_layer"
    head = model._modules.get(name)
    layer = checks.fused_layer(head)
    model_class: Any = type(model)
    bound = _signature(model_class.forward).bind_partial(model, *args, **kwargs)
    arguments = {**kwargs, **bound.arguments}
    labels = arguments.get("labels", arguments.get("lm_labels"))  # the latter in a T5Model
    if labels is None and layer.scoring is None:
        return None
    if labels is not None:
        layer.last_metrics = None  # whoever computes the loss, if it is not ours
    if getattr(model.config, "config_logger_dir", ""):
        if labels is not None:
            watchers.warn("config.config_logger_dir is set, for Megatron's logger of inputs")
        return None
    if not checks.is_plugged(model):
        checks.check_loss_of_logits(layer)
        watchers.warn(f"{checks.LOSS} was replaced after use_linear_cross_entropy")
        return None
    vars(model)[name] = SymbolicHead(head, layer, returns_bias=name == "output_layer")
    processor = kwargs.get("output_processor")
    if processor is None:
        return None
    processor = functools.partial(_processed, model, processor)
    return args, {**kwargs, "output_processor": processor}


def _after_forward(model: Any, args: tuple[Any, ...], result: Any) -> None:
    _end_of_symbols(model)
    check_result(result)


def _processed(model: Any, processor: Callable[..., Any], **arguments: Any) -> Any:
    """Call a user's ``output_processor``, with the layer itself, whose logits are real."""
    _end_of_symbols(model)
    return processor(**{**arguments, "output_layer": model.output_layer})


def _end_of_symbols(model: Any) -> None:
    for name in ("lm_head", "output_layer"):
        symbolic = vars(model).get(name)
        if isinstance(symbolic, SymbolicHead):
            symbolic.is_open = False
            del vars(model)[name]
