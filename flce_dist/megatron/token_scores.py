"""``scores``: a model's log-probabilities at ids in place of its logits."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flce_dist.arguments.options import Over, ScheduleOption
from flce_dist.arguments.rank_check import refusals_told
from flce_dist.megatron import checks
from flce_dist.megatron.layouts import check_tokens, transposed
from flce_dist.scores import TokenScores, linear_logprob


def scores(
    model: Any,
    ids: Tensor,
    *args: Any,
    offsets: Tensor | None = None,
    over: Over = "vocabulary",
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
    tp_invariant: bool = False,
    schedule: ScheduleOption = "auto",
    max_logits_bytes: int | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``model(*args, **kwargs)`` without labels; return scores of its tokens at ``ids``.

    The model is one that ``use_linear_cross_entropy`` was called with, or what wraps it. Its
    softcap, logit_scale, vocab_size and impl are those of that call.

    Args:
        ids: [b, s, K], the same on all tensor-parallel ranks; of those tokens that this
            context-parallel rank has. Or [N] with ``offsets`` [s + 1], if b = 1 (as packed).
        temperature: a number, or [b, s]. The other options are those of ``linear_logprob``.

    Returns:
        ``TokenScores`` with logprob [b, s, K], or [N], and the others [b, s]. On a pipeline stage
        without output layer what the model returns.

    Raises:
        ValueError: an argument is wrong, or the model has no plug-in. NotImplementedError: labels
        or an output_processor are given, or others have wrapped or patched the output layer.

    Example::

        out = scores(model, chosen[..., None], ids, positions, None)
        logprob = out.logprob[..., 0]  # [b, s]
    """
    compute = functools.partial(
        _scores_of,
        ids=ids,
        offsets=offsets,
        over=over,
        temperature=temperature,
        with_entropy=with_entropy,
        tp_invariant=tp_invariant,
        schedule=schedule,
        max_logits_bytes=max_logits_bytes,
    )
    return instead_of_logits(model, TokenScores, compute, args, kwargs)


def instead_of_logits(
    model: Any,
    kind: Callable[..., Any],
    compute: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str = "model",
) -> Any:
    """Run ``model(*args, **kwargs)``, whose output layer does ``compute``; return what that does.

    That is of this kind of tuple, of which a wrapper of the model may make a plain one.
    On a pipeline stage without output layer return what the model does.
    """
    owner = owner_of(model)
    if not getattr(owner, "post_process", True):
        return model(*args, **kwargs)
    if not checks.is_plugged(owner):
        raise ValueError(
            f"{name} must be one that use_linear_cross_entropy was called with, got a "
            f"{type(owner).__name__} without: call use_linear_cross_entropy({name}) before it is "
            "wrapped"
        )
    layer = checks.fused_layer(owner.output_layer)
    layer.scoring = compute
    try:
        results = model(*args, **kwargs)
    finally:
        layer.scoring = None
    if isinstance(results, Tensor) or kwargs.get("output_processor") is not None:
        raise NotImplementedError(
            "scores, best_ids and divergence need a model called without labels and "
            "output_processor, config without config_logger_dir, and model.output_layer without "
            "wrappers, patches and hooks of others"
        )
    return kind(*results)


def owner_of(model: Any) -> Any:
    """Return the model of megatron-core that others may wrap."""
    owner = model
    while hasattr(owner, "module"):
        owner = owner.module
    return owner


def _scores_of(layer: Any, hidden: Tensor, weight: Tensor, *, scale: float, **options: Any) -> Any:
    """Return scores [b, s] of hidden [s, b, H]."""
    of_tokens = {"temperature": options["temperature"]}
    if options["offsets"] is None:
        of_tokens["ids"] = options["ids"]
    elif hidden.shape[1] != 1:
        with refusals_told("linear_logprob", layer.tp_group, hidden):
            raise ValueError(f"offsets need a batch of one row, got {hidden.shape[1]}")
    check_tokens(layer, "linear_logprob", hidden, **of_tokens)
    options = {name: transposed(x) for name, x in options.items()}
    results = linear_logprob(hidden, weight, **options, **layer.keywords_of_logits(weight, scale))
    return TokenScores(*map(transposed, results))
