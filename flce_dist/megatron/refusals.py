"""What the plug-in does not support, refused by name before the first step."""

from typing import Any

from torch import nn

from flce_dist.op import checks
from flce_dist.options import LossOptions

_LOSS, _FUSED = "compute_language_model_loss", "megatron.core.transformer.linear_cross_entropy"


def check_wrapping(model: Any) -> None:
    """Refuse Float16Module, DDP and FSDP around a model."""
    if isinstance(getattr(model, "_modules", {}).get("module"), nn.Module):
        raise ValueError(
            f"model must be the model itself, got it wrapped in {type(model).__name__}; call "
            "use_linear_cross_entropy before it is wrapped"
        )


def checked_class(model: Any, layer: Any) -> type:
    """Return the class that replaces that of the output layer; raise if none does."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from flce_dist.megatron import column_parallel
    from flce_dist.megatron.fused_layer import FusedLayer

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
    _check_model(model, layer)
    return replacement


def checked_options(options: LossOptions, layer: Any) -> LossOptions:
    """Return the options with values of Python's types."""
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


def _check_model(model: Any, layer: Any) -> None:
    """Refuse a loss that the model defines itself, which would be dropped, and sharded weights."""
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
    for name, module in (("output_layer", layer), ("embedding", embedding)):
        is_sharded = getattr(getattr(module, "weight", None), "is_gtp_weight_remat", False)
        if is_sharded or getattr(module, "gtp_remat_size", 1) > 1:
            raise NotImplementedError(
                f"the weight of model.{name} is sharded by GTP, which is not supported"
            )
