"""A ``vocab_order`` in a model of megatron-core: rows, input ids and real logits.

V = rows of this rank, P = tensor-parallel size, V_all = entries that the order is of; rows from
V_all on are padding and stay where they are.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.filtered.order_checks import agreed_order
from flce_dist.filtered.vocab_order import MAP, VocabOrder, as_vocab_order, rows_of
from flce_dist.megatron.ordered_checkpoints import guard_checkpoints
from flce_dist.parallel import collectives

_GATHERED = 1 << 26
"""Elements of the weights of all ranks that exist at once while rows move."""


def order_rows(model: Any, order: VocabOrder | Tensor | None, vocab_size: int | None) -> None:
    """Move the rows of this pipeline stage's output layer and tied embedding into ``order``.

    The model computes what it did before; without an order a stage that has no output layer is left
    alone. Collective over the tensor-parallel group, with ``order=None``, too: ranks may differ in
    that.
    """
    layer: Any = model.output_layer if getattr(model, "post_process", True) else None
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    embedding = getattr(model, "embedding", None) if tied else None
    words: Any = None if embedding is None else embedding.word_embeddings
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
    guard_checkpoints(model, has_order=found is not None)
    if layer is not None:
        _set_order(layer, found, like.device, persistent=True)
    if words is not None and found is not None:
        words.register_forward_pre_hook(_ids_as_rows, with_kwargs=True)
        _set_order(words, found, like.device, persistent=layer is None)


def _set_order(
    module: Any, order: VocabOrder | None, device: torch.device, *, persistent: bool
) -> None:
    """Order a module's rows; make the row of each token a buffer, persistent in one per stage."""
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
    from megatron.core.tensor_parallel import (
        gather_from_tensor_model_parallel_region,
        scatter_to_tensor_model_parallel_region,
    )

    is_split = logits.shape[-1] != layer.output_size
    if is_split:
        logits = gather_from_tensor_model_parallel_region(logits, group=layer.tp_group)
    logits = logits.index_select(-1, _with_padding(layer.row_of_token, layer.output_size))
    if is_split:
        logits = scatter_to_tensor_model_parallel_region(logits, group=layer.tp_group)
    return logits


def place_of_token(layer: Any, place: Tensor) -> Tensor:
    """Turn a row of this rank, counted from its first one, into its token id counted from there.

    So whoever adds the first row of the rank gets the id, as without an order.
    """
    if layer.row_of_token is None:
        return place
    first = layer.tp_group.rank() * layer.output_size_per_partition
    tokens = _with_padding(layer.row_of_token.argsort(), layer.output_size)
    return tokens[place + first] - first
