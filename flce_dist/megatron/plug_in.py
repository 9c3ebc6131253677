"""``use_linear_cross_entropy``: where the plug-in meets the model.

Megatron's models build their output layer themselves; no spec can replace it. With labels they
call ``logits, _ = self.output_layer(hidden, weight=...)`` and then
``self.compute_language_model_loss(labels, logits)``, and multi-token prediction makes the same two
calls once per depth. The layer's class becomes a subclass, which in these calls returns
``LazyLogits``, and the method computes the loss of those. Everywhere else the layer returns real
logits: without labels, in ``compute_mtp_single_step``, for a user's ``output_processor`` and under
forward hooks. Only ``vocab_order`` changes parameters or ``sharded_state_dict``.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flce_dist.filtered.vocab_order import VocabOrder
from flce_dist.megatron import refusals
from flce_dist.megatron.fused_layer import LazyLogits
from flce_dist.megatron.vocab_rows import order_rows
from flce_dist.options import LossOptions, keywords_of

_FIXED = {
    "sequence_parallel": False,  # the layer passes its own setting
    "sequence_dim": 0,
    "vocab_range": None,
    "reduce_dhidden": True,
    "reduce_in_fp32": False,
    "tp_invariant": False,
    "accumulate_dweight": False,  # so is gradient_accumulation_fusion
}
"""Options that the model decides or the output layer does not support."""

_signature = functools.cache(inspect.signature)


def use_linear_cross_entropy(
    model: Any,
    *,
    metrics: bool = False,
    vocab_order: VocabOrder | Tensor | None = None,
    **options: Any,
) -> Any:
    """Make ``model`` compute its loss by ``linear_cross_entropy``, and return it.

    Call it when the model is built, before it is wrapped in Float16Module, DDP or FSDP, on every
    rank and pipeline stage: a stage without output layer is left as it is, unless ``vocab_order``
    moves the rows of its tied embedding. Ranks of one tensor-parallel group compare their
    ``vocab_order`` by an all-reduce of 16 bytes, also where it is None. With labels [b, s] the
    model then returns the loss [b, s] fp32 as before. The tensor-parallel group, sequence
    parallelism, tied embeddings, MuP's scale and gradient_accumulation_fusion are the model's.
    ``config``'s own cross-entropy fusions are not used.

    Args:
        model: a ``GPTModel``, ``MambaModel``, ``HybridModel``, ``T5Model`` or a subclass; or a list
            of them, the pipeline stages of this rank.
        metrics: keep the ``LossWithMetrics`` [b, s] of the latest loss, detached, as
            ``model.output_layer.last_metrics``: accuracy, entropy and lse from the same pass. With
            multi-token prediction the latest loss is that of the next token.
        vocab_order: which token each row of the output layer, and of an embedding tied to it, is
            of; the same on all ranks and stages. Rows move there now. Input ids, labels and logits
            keep the tokenizer's ids. ``row_of_token`` is in state dicts; rows of another order, or
            of none, are refused.
        **options: reduction, ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale,
            vocab_size, schedule, max_logits_bytes, max_counted, skip_ignored and impl,
            as in ``linear_cross_entropy``. Real logits have logit_scale and softcap applied, and
            keep the padding columns from ``vocab_size`` on. max_counted and skip_ignored look at
            labels, not at Megatron's loss_mask; with multi-token prediction max_counted must hold
            at each depth, where Megatron appends labels of 0. reduction is "none" by default; "sum"
            makes the model return the sum of the loss, a scalar: for training loops that mask no
            token, which schedule="in_forward" needs.

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
        refusals.check_wrapping(stage)
        if getattr(stage, "post_process", True):
            _replace(stage, chosen, metrics)
        order_rows(stage, vocab_order, chosen.vocab_size)
    return model


def _replace(model: Any, chosen: LossOptions, metrics: bool) -> None:
    layer: Any = getattr(model, "output_layer", None)
    layer_class = refusals.checked_class(model, layer)
    chosen = refusals.checked_options(chosen, layer)
    omitted = {*_FIXED, "with_metrics"}
    layer.loss_keywords = {name: x for name, x in vars(chosen).items() if name not in omitted}
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
    keywords = layer.loss_keywords
    for name in ("reduction", "ignore_index", "label_smoothing", "z_loss_weight", "vocab_size"):
        same = (default[name], layer.output_size) if name == "vocab_size" else (default[name],)
        if keywords[name] not in same:
            raise NotImplementedError(
                f"compute_language_model_loss of real logits does not apply {name}="
                f"{keywords[name]!r}; logits are real for an output_processor, under forward hooks "
                "of the output layer, and where the model is not called as a module with labels"
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
