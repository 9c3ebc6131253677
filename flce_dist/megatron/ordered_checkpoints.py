"""A ``vocab_order`` in checkpoints of megatron-core: no rows of another order, or of none.

Megatron's loader of distributed checkpoints asks for tensors by their keys, and passes over those
that it was not asked for. So ordered rows have keys of their own, which no model without an order
asks for; it then asks for keys that the checkpoint does not have, which the loader refuses.
"""

import functools
from typing import Any

from flce_dist.filtered.order_checks import mismatch
from flce_dist.filtered.vocab_order import MAP

ORDERED = ".in_vocab_order"
"""Ends the key of ordered rows in a distributed checkpoint, and those of their optimizer state."""

_LAYER, _WORDS = "output_layer.", "embedding.word_embeddings."


def guard_checkpoints(model: Any, has_order: bool) -> None:
    """Check the order of rows that are loaded, and give ordered ones keys of their own.

    A pipeline stage has the row of each token beside its output layer; beside its tied embedding if
    it has no output layer.
    """
    model.register_load_state_dict_pre_hook(_before_load)
    if has_order:
        # Bound by partial, as compute_language_model_loss is.
        model.sharded_state_dict = functools.partial(_sharded_state_dict, model)


def _rows_of(model: Any, prefix: str) -> list[str]:
    """Return the names of this stage's parameters whose rows an order moves."""
    names = [f"{prefix}{_LAYER}weight", f"{prefix}{_LAYER}bias"]
    if getattr(model, "share_embeddings_and_output_weights", False):
        names.append(f"{prefix}{_WORDS}weight")
    return names


def _sharded_state_dict(model: Any, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the model's own ``sharded_state_dict`` with the keys of ordered rows."""
    from megatron.core.dist_checkpointing import ShardedTensor

    state: dict[str, Any] = type(model).sharded_state_dict(model, prefix, *args, **kwargs)
    for name in _rows_of(model, prefix):
        if name in state:
            state[name].key += ORDERED
    if not getattr(model, "post_process", True):
        words = model.embedding.word_embeddings
        data_rank = state[f"{prefix}{_WORDS}weight"].replica_id[-1]
        state[f"{prefix}{_WORDS}{MAP}"] = ShardedTensor.from_rank_offsets(
            f"{prefix}{_LAYER}{MAP}",  # that of the last stage, of which this is a copy
            words.row_of_token,
            replica_id=(1, words.tp_group.rank(), data_rank),
        )
    return state


def _before_load(model: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Refuse rows of another order, with ``strict=False``, too."""
    error_msgs: list[str] = rest[-1]
    if getattr(model, "post_process", True):
        own, key = model.output_layer.vocab_order, f"{prefix}{_LAYER}{MAP}"
    else:
        own, key = model.embedding.word_embeddings.vocab_order, f"{prefix}{_WORDS}{MAP}"
    if any(name in state_dict for name in _rows_of(model, prefix)):
        problem = mismatch(state_dict.get(key), own, key)
        if problem is not None:
            error_msgs.append(problem)
