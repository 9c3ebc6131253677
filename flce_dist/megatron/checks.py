"""What the plug-in refuses: models, output layers, options, and what was changed behind it."""

from typing import Any

from torch import nn

from flce_dist.arguments.check_options import check_options
from flce_dist.arguments.options import LossOptions
from flce_dist.megatron import watchers
from flce_dist.megatron.fused_layer import FusedLayer

LOSS = "compute_language_model_loss"
_OF_LOGITS = "reduction", "ignore_index", "label_smoothing", "z_loss_weight", "vocab_size"


def check_model(model: Any, layer: Any) -> None:
    """Raise if the loss of ``model`` cannot be computed without the logits of ``layer``."""
    method = getattr(type(model), LOSS, None)
    is_patched = LOSS in vars(model) and not is_plugged(model)
    if method is None or is_patched or not method.__module__.startswith("megatron.core."):
        raise NotImplementedError(
            f"{type(model).__name__} must have megatron-core's {LOSS}, got another, which "
            "use_linear_cross_entropy would drop"
        )
    if getattr(model.config, "defer_embedding_wgrad_compute", False):
        raise NotImplementedError(
            "config.defer_embedding_wgrad_compute=True is not supported; set it to False"
        )
    embedding = getattr(getattr(model, "embedding", None), "word_embeddings", None)
    for owner, module in (("output_layer", layer), ("embedding", embedding)):
        is_sharded = getattr(getattr(module, "weight", None), "is_gtp_weight_remat", False)
        if is_sharded or getattr(module, "gtp_remat_size", 1) > 1:
            raise NotImplementedError(
                f"the weight of model.{owner} is sharded by GTP, which is not supported"
            )


def check_layer(model: Any, layer: Any) -> None:
    """Raise if the model's output layer is missing, replaced already, or patched."""
    if layer is None:
        way_out = ""
        if hasattr(model, LOSS):
            way_out = ": pipeline stages without one have post_process=False"
        elif any(base.__module__.startswith("transformers.") for base in type(model).mro()):
            way_out = ": for a model of transformers there is flce_dist.hf"
        elif isinstance(model, nn.Module):
            way_out = ": pass the model that it is a part of, such as a GPTModel"
        raise ValueError(
            f"model must have an output_layer, got a {type(model).__name__} without one{way_out}"
        )
    if any(isinstance(module, FusedLayer) for module in layer.modules()):
        raise ValueError(
            "model.output_layer must have no plug-in of another model, or below what wraps it: "
            "call use_linear_cross_entropy before others take the layer"
        )
    if "forward" in vars(layer):
        raise NotImplementedError(
            "model.output_layer must have the forward of its class, got it patched, which needs "
            "logits; a patch after use_linear_cross_entropy gets them, and no memory is saved"
        )


def unknown_class(layer: nn.Module) -> NotImplementedError:
    """Return the error for an output layer of a class that has no replacement."""
    name = type(layer).__name__
    hint = ""
    if name == "TELMHeadColumnParallelLinear":
        hint = "; set fp8_output_proj=False"
    elif any(hasattr(module, "output_size_per_partition") for module in layer.children()):
        hint = "; leave output_layer out of what is wrapped: an adapter on it needs logits"
    return NotImplementedError(
        "model.output_layer must be a ColumnParallelLinear or LinearCrossEntropyModule of "
        f"megatron-core, got {name}{hint}"
    )


def checked_for_layer(options: LossOptions, layer: Any) -> LossOptions:
    """Return the options, checked as far as the layer alone decides."""
    if options.schedule == "in_forward" and options.reduction == "none":
        raise NotImplementedError(
            'schedule="in_forward" needs a summed loss, but Megatron asks for one per token; '
            'use "auto", "cached" or "recompute", or reduction="sum" in a loop of your own'
        )
    options = check_options(options)
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


def is_plugged(model: Any) -> bool:
    """Whether the loss of ``model`` is the plug-in's."""
    function = getattr(vars(model).get(LOSS), "func", None)
    return getattr(function, "__module__", "").startswith("flce_dist.megatron.")


def fused_layer(head: Any) -> Any:
    """Return the layer of the plug-in that ``head`` is or contains; raise if there is none."""
    modules = head.modules() if isinstance(head, nn.Module) else ()
    layer = next((module for module in modules if isinstance(module, FusedLayer)), None)
    if layer is None:
        raise ValueError(
            "model.output_layer must be the one that use_linear_cross_entropy changed, got "
            f"another, {type(head).__name__}; call it again, after model.output_layer is set"
        )
    changed = watchers.changed_forward(head, layer)
    for name, default in (("softcap", None), ("logit_scale", 1.0)):
        value = layer.loss_keywords[name]
        if changed is not None and value != default:
            raise NotImplementedError(
                f"{name}={value} is not supported if model.output_layer is changed after "
                f"use_linear_cross_entropy, but {changed}: it would apply to a part of the logits"
            )
    return layer


def check_loss_of_logits(layer: Any) -> None:
    """Raise if Megatron's loss of real logits would not apply an option."""
    default = vars(LossOptions(reduction="none"))
    for name in _OF_LOGITS:
        value = layer.loss_keywords[name]
        if value != default[name] and (name, value) != ("vocab_size", layer.output_size):
            raise NotImplementedError(
                f"compute_language_model_loss of real logits does not apply {name}={value!r}; "
                "logits are real for an output_processor, if model.output_layer is wrapped or "
                "patched or has forward hooks, if compute_language_model_loss is replaced, and if "
                "the model is not called as a module with labels"
            )
