"""``best_ids``: a model's best ids and its labels' ranks in place of its logits."""

import functools
from typing import Any

from torch import Tensor

from flce_dist.best import BestIds, linear_top_k
from flce_dist.megatron.layouts import check_tokens, transposed
from flce_dist.megatron.token_scores import instead_of_logits


def best_ids(
    model: Any,
    *args: Any,
    k: int | None = None,
    labels: Tensor | None = None,
    top_p: float | None = None,
    temperature: float | Tensor = 1.0,
    tp_invariant: bool = False,
    ignore_index: int = -100,
    **kwargs: Any,
) -> Any:
    """Run ``model(*args, **kwargs)`` without labels; return the best ids of its tokens.

    The model is one that ``use_linear_cross_entropy`` was called with, or what wraps it. Its
    softcap, logit_scale, vocab_size and impl are those of that call. Call it under
    ``torch.no_grad()``. A label is the best id where ``label_rank`` is 0: the accuracy of a model
    whose vocabulary is shared needs no logits.

    Args:
        k, labels, top_p, temperature: as for ``linear_top_k``; labels and a temperature of each
            token are [b, s], of those tokens that this context-parallel rank has.
        ignore_index: label of tokens that get no results.

    Returns:
        ``BestIds`` with ids and logprob [b, s, k], and the others [b, s]; the same on all
        tensor-parallel ranks. On a pipeline stage without output layer what the model returns.

    Raises:
        ValueError: an argument is wrong, or the model has no plug-in. NotImplementedError: labels
        or an output_processor are given, or others have wrapped or patched the output layer.

    Example::

        with torch.no_grad():
            best = best_ids(model, ids, positions, None, k=4, labels=labels)
        correct = best.label_rank == 0  # [b, s]
    """
    compute = functools.partial(
        _best_of,
        k=k,
        labels=labels,
        top_p=top_p,
        temperature=temperature,
        tp_invariant=tp_invariant,
        ignore_index=ignore_index,
    )
    return instead_of_logits(model, BestIds, compute, args, kwargs)


def _best_of(layer: Any, hidden: Tensor, weight: Tensor, *, scale: float, **asked: Any) -> BestIds:
    """Return best ids [b, s] of hidden [s, b, H]."""
    of_tokens = {name: asked[name] for name in ("labels", "temperature")}
    check_tokens(layer, "linear_top_k", hidden, **of_tokens)
    asked = {name: transposed(x) for name, x in asked.items()}
    of_layer = layer.keywords_of_logits(weight, scale)
    del of_layer["accumulate_dweight"]  # of gradients
    best: Any = linear_top_k(hidden, weight, **asked, **of_layer)
    return BestIds(*map(transposed, best))
