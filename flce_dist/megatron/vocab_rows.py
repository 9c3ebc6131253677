"""A ``vocab_order`` in a model of megatron-core: rows, input ids, real logits and checkpoints.

V = rows of this rank, P = tensor-parallel size, V_all = entries that the order is of; rows from
V_all on are padding and stay where they are.

Megatron's loader of distributed checkpoints asks for tensors by their keys, and passes over those
that it was not asked for. So ordered rows have keys of their own, which no model without an order
asks for; it then asks for keys that the checkpoint does not have, which the loader refuses.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.filtered.order_checks import agreed_order, mismatch
from flce_dist.filtered.vocab_order import MAP, VocabOrder, as_vocab_order, rows_of
from flce_dist.parallel import collectives

_GATHERED = 1 << 26  # elements of the weights of all ranks that exist at once while rows move
_IN_ORDER = ".in_vocab_order"
"""Ends the key of ordered rows in a distributed checkpoint, and those of their optimizer state."""

_LAYER, _WORDS = "output_layer.", "embedding.word_embeddings."


def order_rows(model: Any, order: VocabOrder | Tensor | None, vocab_size: int | None) -> None:
    """Move the rows of this pipeline stage's output layer and tied embedding into ``order``.

    The model computes what it did before; without an order a stage that has no output layer is left
    alone. Collective over the tensor-parallel group, also with ``order=None``: ranks may differ.
    """
    layer, words = _layers(model)
    if layer is None and words is None:
        return
    like, group = next(model.parameters()), (words if layer is None else layer).tp_group

    def make() -> VocabOrder | None:
        if order is None:
            return None
        if like.is_meta:
            raise NotImplementedError(
                "vocab_order is not supported for a model on the meta device; build it on the CPU "
                "or on a GPU"
            )
        rows = words.num_embeddings if layer is None else layer.output_size
        return as_vocab_order(order, vocab_size or rows)

    found = agreed_order(make, like, [group])
    if layer is None and found is None:
        return
    model.register_load_state_dict_pre_hook(_before_load)
    if found is not None:
        # Bound by partial, as compute_language_model_loss is.
        model.sharded_state_dict = functools.partial(_sharded_state_dict, model)
    if layer is not None:
        _set_order(layer, found, like.device, persistent=True)
    if words is not None and found is not None:
        words.register_forward_pre_hook(_ids_as_rows, with_kwargs=True)
        _set_order(words, found, like.device, persistent=layer is None)


def _layers(model: Any) -> tuple[Any, Any]:
    """Return this stage's output layer and tied embedding, None for what it does not have."""
    layer = model.output_layer if getattr(model, "post_process", True) else None
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    embedding = getattr(model, "embedding", None) if tied else None
    return layer, None if embedding is None else embedding.word_embeddings


def _set_order(
    module: Any, order: VocabOrder | None, device: torch.device, *, persistent: bool
) -> None:
    """Order a module's rows; make the row of each token a buffer, persistent in one per stage.

    That is the output layer, or the tied embedding of a stage without one.
    """
    module.vocab_order = order
    rows = None if order is None else order.row_of_token.to(device, copy=True)
    module.register_buffer(MAP, rows, persistent=persistent)
    for parameter in (module.weight, getattr(module, "bias", None)):
        if order is not None and parameter is not None:
            _move_rows(parameter, order, module.tp_group)


@torch.no_grad()
def _move_rows(parameter: Tensor, order: VocabOrder, group: dist.ProcessGroup) -> None:
    """Give each row [V, ...] of this rank the values of its token, gathered by columns."""
    V, P = parameter.shape[0], group.size()
    tokens = _with_padding(order.token_of_row, V * P)[group.rank() * V :][:V].to(parameter.device)
    columns = parameter.view(V, -1)
    for window in columns.split(max(1, _GATHERED // (V * P)), dim=1):
        window.copy_(collectives.gather_tokens(window, group)[tokens])


def _with_padding(rows: Tensor, size: int) -> Tensor:
    return torch.cat([rows, torch.arange(len(rows), size, device=rows.device)])


def _ids_as_rows(embedding: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = embedding.row_of_token
    if args:
        return (rows_of(args[0], rows), *args[1:]), kwargs
    return args, {**kwargs, "input_": rows_of(kwargs["input_"], rows)}


def by_token(layer: Any, logits: Tensor) -> Tensor:
    """Return logits [..., V] of rows as those of token ids, on this rank or gathered as before.

    If they are split over ranks, those of all ranks exist in between.
    """
    if layer.row_of_token is None:
        return logits
    from megatron.core.tensor_parallel import mappings

    is_split = logits.shape[-1] != layer.output_size
    if is_split:
        logits = mappings.gather_from_tensor_model_parallel_region(logits, group=layer.tp_group)
    logits = logits.index_select(-1, _with_padding(layer.row_of_token, layer.output_size))
    if is_split:
        logits = mappings.scatter_to_tensor_model_parallel_region(logits, group=layer.tp_group)
    return logits


def place_of_token(layer: Any, place: Tensor) -> Tensor:
    """Turn a row, counted from this rank's first one, into its token id counted from there."""
    if layer.row_of_token is None:
        return place
    first = layer.tp_group.rank() * layer.output_size_per_partition
    tokens = _with_padding(layer.row_of_token.argsort(), layer.output_size)
    return tokens[place + first] - first


def _ordered_names(words: Any, prefix: str) -> list[str]:
    """Return the names of a stage's parameters whose rows an order moves."""
    names = [f"{prefix}{_LAYER}weight", f"{prefix}{_LAYER}bias"]
    return names if words is None else [*names, f"{prefix}{_WORDS}weight"]


def _sharded_state_dict(model: Any, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the model's own ``sharded_state_dict`` with the keys of ordered rows."""
    from megatron.core.dist_checkpointing import ShardedTensor

    state: dict[str, Any] = type(model).sharded_state_dict(model, prefix, *args, **kwargs)
    layer, words = _layers(model)
    for name in _ordered_names(words, prefix):
        if name in state:
            state[name].key += _IN_ORDER
    if layer is None:
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
    layer, words = _layers(model)
    holder, name = (words, _WORDS) if layer is None else (layer, _LAYER)
    if any(name in state_dict for name in _ordered_names(words, prefix)):
        key = f"{prefix}{name}{MAP}"
        problem = mismatch(state_dict.get(key), holder.vocab_order, key)
        error_msgs += [] if problem is None else [problem]
