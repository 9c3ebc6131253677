"""``use_linear_cross_entropy``: where the plug-in meets the model, and what it refuses.

Megatron's models build their output layer themselves; no spec can replace it. With labels they
call ``logits, _ = self.output_layer(hidden, weight=...)`` and then
``self.compute_language_model_loss(labels, logits)``, and multi-token prediction makes the same two
calls once per depth. The layer's class becomes a subclass, which in these calls returns
``LazyLogits``, and the method computes the loss of those. Everywhere else the layer returns real
logits: without labels, in ``compute_mtp_single_step``, for a user's ``output_processor`` and under
forward hooks. Parameters and state dicts stay as they are.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from flce_dist.arguments import checks
from flce_dist.arguments.options import KEYWORDS, LossOptions, keywords_of
from flce_dist.megatron.fused_layer import FusedLayer, LazyLogits

_FIXED: dict[str, Any] = dict(
    sequence_parallel=False, sequence_dim=0, vocab_range=None, reduce_dhidden=True,
    reduce_in_fp32=False, tp_invariant=False, accumulate_dweight=False,
)  # fmt: skip
"""Options that the model decides or the output layer does not support."""

_LOSS, _FUSED = "compute_language_model_loss", "megatron.core.transformer.linear_cross_entropy"
_signature = functools.cache(inspect.signature)


def use_linear_cross_entropy(model: Any, *, metrics: bool = False, **options: Any) -> Any:
    """Make ``model`` compute its loss by ``linear_cross_entropy``, and return it.

    Call it before the model is wrapped in Float16Module, DDP or FSDP, on every rank and pipeline
    stage: one without output layer is left as it is. With labels [b, s] the model returns the loss
    [b, s] fp32 as before. The tensor-parallel group, sequence parallelism, tied embeddings, MuP's
    scale and gradient_accumulation_fusion are the model's; its cross-entropy fusions are unused.

    Args:
        model: a ``GPTModel``, ``MambaModel``, ``HybridModel``, ``T5Model`` or a subclass; or a list
            of them, the pipeline stages of this rank.
        metrics: keep the ``LossWithMetrics`` [b, s] of the latest loss, detached, as
            ``model.output_layer.last_metrics``. With multi-token prediction: of the next token.
        **options: reduction, ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale,
            vocab_size, schedule, max_logits_bytes, max_counted, skip_ignored and impl,
            as in ``linear_cross_entropy``. Real logits have logit_scale and softcap applied, and
            keep the padding columns from ``vocab_size`` on. max_counted and skip_ignored look at
            labels, not at Megatron's loss_mask; with multi-token prediction max_counted must hold
            at each depth, where Megatron appends labels of 0. reduction is "none" by default; with
            "sum", which schedule="in_forward" needs, the model returns a scalar: for training loops
            that mask no token.

    Raises:
        ValueError: the model is wrapped or has no output layer, the layer is already replaced, or
            an option is wrong.
        NotImplementedError: with defer_embedding_wgrad_compute, weights sharded by GTP, an output
            layer of another class (such as MXFP8's), a compute_language_model_loss of the model's
            own, schedule="in_forward" without reduction="sum", or that with multi-token prediction.
    """
    options = {"reduction": "none", **options}
    chosen = LossOptions(**keywords_of(use_linear_cross_entropy, options, **_FIXED))
    for stage in model if isinstance(model, list) else [model]:
        if isinstance(getattr(stage, "_modules", {}).get("module"), nn.Module):
            raise ValueError(
                f"model must be the model itself, got it wrapped in {type(stage).__name__}; call "
                "use_linear_cross_entropy before it is wrapped"
            )
        if getattr(stage, "post_process", True):
            _replace(stage, chosen, metrics)
    return model


def _replace(model: Any, chosen: LossOptions, metrics: bool) -> None:
    layer: Any = getattr(model, "output_layer", None)
    layer_class = checked_class(model, layer)
    chosen = _checked_options(chosen, layer)
    layer.loss_keywords = {name: getattr(chosen, name) for name in KEYWORDS if name not in _FIXED}
    layer.keeps_metrics = metrics
    layer.__class__ = layer_class
    # Bound by partial: copied and pickled with the model, which a method of an instance is not.
    model.compute_language_model_loss = functools.partial(language_model_loss, model)
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    model.register_forward_hook(_after_forward, always_call=True)


def language_model_loss(model: Any, labels: Tensor, logits: Tensor | LazyLogits) -> Tensor:
    """``compute_language_model_loss``: labels [b, s] to the loss [b, s] fp32, or to its sum.

    The loss of real logits is Megatron's, which knows none of our options.
    """
    if isinstance(logits, LazyLogits):
        loss = logits.loss(labels.transpose(0, 1))
        return loss.transpose(0, 1).contiguous() if loss.dim() == 2 else loss
    layer, default = model.output_layer, vars(LossOptions(reduction="none"))
    for name in ("reduction", "ignore_index", "label_smoothing", "z_loss_weight", "vocab_size"):
        given = layer.loss_keywords[name]
        if given != default[name] and (name, given) != ("vocab_size", layer.output_size):
            raise NotImplementedError(
                f"compute_language_model_loss of real logits does not apply {name}={given!r}; "
                "logits are real for an output_processor, under forward hooks of the output layer, "
                "and where the model is not called as a module with labels"
            )
    return type(model).compute_language_model_loss(model, labels, logits)


def _before_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the layer be lazy in this call of the model if it has labels, or is for scores."""
    model_class: Any = type(model)
    bound = _signature(model_class.forward).bind_partial(model, *args, **kwargs)
    given = {**kwargs, **bound.arguments}
    labels = given.get("labels", given.get("lm_labels"))  # the latter in a T5Model
    # Megatron's logger of inputs writes the logits to disk.
    logs = bool(getattr(model.config, "config_logger_dir", ""))
    layer = model.output_layer
    layer.is_lazy = (labels is not None or layer.scoring is not None) and not logs
    processor = kwargs.get("output_processor")
    if processor is None:
        return None
    return args, {**kwargs, "output_processor": functools.partial(_with_real_logits, processor)}


def _after_forward(model: Any, args: tuple[Any, ...], result: Any) -> None:
    model.output_layer.is_lazy = False


def _with_real_logits(processor: Callable[..., Any], **given: Any) -> Any:
    given["output_layer"].is_lazy = False
    return processor(**given)


def checked_class(model: Any, layer: Any) -> type:
    """Return the class that replaces that of the output layer; raise if none does."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from flce_dist.megatron import column_parallel

    if layer is None:
        raise ValueError(
            "model must have an output_layer; pipeline stages with post_process=False have none"
        )
    if isinstance(layer, FusedLayer):
        raise ValueError("model must not have its output layer replaced twice")
    name, module = type(layer).__name__, type(layer).__module__
    if type(layer) is ColumnParallelLinear:
        replacement: type = column_parallel.ColumnParallelLinear
    elif (module, name) == (_FUSED, "LinearCrossEntropyModule"):
        from flce_dist.megatron import linear_cross_entropy_module

        replacement = linear_cross_entropy_module.LinearCrossEntropyModule
    else:
        hint = "; set fp8_output_proj=False" if name == "TELMHeadColumnParallelLinear" else ""
        raise NotImplementedError(
            "model.output_layer must be a ColumnParallelLinear or LinearCrossEntropyModule of "
            f"megatron-core, got {name}{hint}"
        )
    method = getattr(type(model), _LOSS, None)
    if method is None or _LOSS in vars(model) or not method.__module__.startswith("megatron.core."):
        raise NotImplementedError(
            f"{type(model).__name__} must have megatron-core's {_LOSS}, got another, which "
            "use_linear_cross_entropy would drop"
        )
    if getattr(model.config, "defer_embedding_wgrad_compute", False):
        raise NotImplementedError(
            "config.defer_embedding_wgrad_compute=True is not supported; set it to False"
        )
    embedding = getattr(getattr(model, "embedding", None), "word_embeddings", None)
    for owner, one in (("output_layer", layer), ("embedding", embedding)):
        is_sharded = getattr(getattr(one, "weight", None), "is_gtp_weight_remat", False)
        if is_sharded or getattr(one, "gtp_remat_size", 1) > 1:
            raise NotImplementedError(
                f"the weight of model.{owner} is sharded by GTP, which is not supported"
            )
    return replacement


def _checked_options(options: LossOptions, layer: Any) -> LossOptions:
    if options.schedule == "in_forward" and options.reduction == "none":
        raise NotImplementedError(
            'schedule="in_forward" needs a summed loss, but Megatron asks for one per token; '
            'use "auto", "cached" or "recompute", or reduction="sum" in a loop of your own'
        )
    options = checks.check_options(options)
    if options.reduction == "mean":
        raise ValueError('reduction must be "none" or "sum" in a model of Megatron, got "mean"')
    if options.reduction == "sum" and getattr(layer.config, "mtp_num_layers", None):
        raise NotImplementedError(
            'reduction="sum" is not supported with multi-token prediction, which masks the loss of '
            f"single tokens, got mtp_num_layers={layer.config.mtp_num_layers}"
        )
    if options.vocab_size is not None and options.vocab_size > layer.output_size:
        raise ValueError(
            f"vocab_size must be at most the {layer.output_size} rows of model.output_layer, "
            f"got {options.vocab_size}"
        )
    return options
