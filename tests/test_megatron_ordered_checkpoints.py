"""Checkpoints of megatron-core's models hold a vocab_order once, and another one is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megatron.core")

from flce_dist.megatron import use_linear_cross_entropy
from tests.megatron_models import (
    EMBEDDING,
    VOCAB,
    first_stage,
    megatron,
    order_of,
    plain_and_ordered,
)
from tests.on_ranks import on_ranks


@pytest.mark.parametrize(
    "tp, tied, is_first", [(1, False, False), (2, True, False), (2, False, False), (2, True, True)]
)
@on_ranks("tp")
def test_sharded_checkpoints_hold_the_order_once(group, tp, tied, is_first):
    """A first stage holds a copy of it, to check the order that it loads.

    dist_checkpointing asks by key, and loads in place.
    """

    def model(order: Any, *, is_first: bool = is_first) -> Any:
        model = first_stage(tp) if is_first else megatron(tp, False, tied)
        return use_linear_cross_entropy(model, vocab_order=order)

    def sharded(model: Any) -> Any:
        found = model.sharded_state_dict(metadata={"dp_cp_group": alone})
        return {name: x for name, x in found.items() if isinstance(x, ShardedTensor)}

    def content(model: Any) -> dict[str, Tensor]:
        return {x.key: x.data.detach().clone() for x in sharded(model).values()}

    def load(model: Any, saved: dict[str, Tensor], strict: bool = True) -> None:
        state = {name: x.data.detach().copy_(saved[x.key]) for name, x in sharded(model).items()}
        model.load_state_dict(state, strict=strict)

    from megatron.core.dist_checkpointing import ShardedTensor
    from torch.distributed import new_group

    alone = new_group([group.rank()], use_local_synchronization=True)
    ordered = model(order_of())
    saved, without = content(model(order_of(), is_first=False)), content(model(None))
    rows = EMBEDDING if tied else "output_layer.weight"
    in_order = f"{rows}.in_vocab_order"
    added = saved.keys() - without.keys()
    assert added >= {in_order, "output_layer.row_of_token"} and rows not in saved
    assert content(ordered).keys() <= saved.keys()

    same = model(order_of())
    for parameter in same.parameters():
        nn.init.zeros_(parameter)
    load(same, saved)
    for name, x in ordered.state_dict().items():
        assert x is None or torch.equal(same.state_dict()[name], x), name
    with pytest.raises(KeyError, match=f"'{rows}'"):
        load(model(None), saved)
    with pytest.raises(KeyError, match=f"'{in_order}'"):
        load(model(order_of()), without)
    map_name = "embedding.word_embeddings" if is_first else "output_layer"
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=rf"another vocab_order \({map_name}.row_of_token\)"):
            load(model(order_of(seed=1)), saved, strict)
    entry = sharded(ordered)[f"{map_name}.row_of_token"]
    assert entry.key == "output_layer.row_of_token"
    assert entry.replica_id == (int(is_first), group.rank(), 0)
    assert (entry.global_shape, entry.global_offset) == ((VOCAB,), (0,))


@pytest.mark.parametrize("tied, is_first", [(False, False), (True, False), (True, True)])
@on_ranks(2)
def test_state_dicts_of_another_order_or_none_are_refused(group, tied, is_first):
    plain, model = plain_and_ordered(2, True, tied)
    if is_first:
        plain, model = (
            use_linear_cross_entropy(first_stage(2), vocab_order=order)
            for order in (None, order_of())
        )
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="convert --to ordered"):
            model.load_state_dict(plain.state_dict(), strict=strict)
        if not is_first:  # a first stage without an order is left alone
            with pytest.raises(RuntimeError, match="this layer has none"):
                plain.load_state_dict(model.state_dict(), strict=strict)
        model.load_state_dict(model.state_dict(), strict=strict)
    model.load_state_dict({}, strict=False)
    if is_first:
        with pytest.raises(RuntimeError, match=r"Unexpected .* \"embedding.*row_of_token\""):
            plain.load_state_dict(model.state_dict())
