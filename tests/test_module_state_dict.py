"""State dicts of LinearCrossEntropy: saved by some ranks, loaded by others."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from flce_dist.op import dtensor
from tests.module_layouts import (
    LAYOUTS,
    ORDER,
    PADDED,
    VOCAB,
    H,
    Layout,
    assert_same_state,
    check_attributes,
    each_layout,
    make,
    whole,
)
from tests.on_ranks import on_ranks

UNEVEN = {"large": VOCAB, "tiny": 5}
UNEVEN_ROWS = {  # of each rank
    Layout(tp=4): [[127, 2], [127, 2], [127, 1], [126, 0]],
    Layout(tp=2, fsdp=2): [[127, 2], [127, 1], [127, 1], [126, 1]],
}


def heads(layout: Layout, seed: int, *, on_meta: bool = False) -> nn.ModuleDict:
    sizes: dict[str, Any] = {"seed": seed, "padded_vocab_size": PADDED, "on_meta": on_meta}
    layers = {
        "plain": layout.make(bias=True, **sizes),
        "ordered": layout.make(vocab_order=ORDER, **sizes),
    }
    for name, n in UNEVEN.items():
        layers[name] = layout.make(seed=seed, vocab_size=n, on_meta=on_meta)
    return nn.ModuleDict(layers)


def save_rank(group: dist.ProcessGroup, layout: Layout, path: Path) -> None:
    layers = heads(layout, seed=0)
    plain = layers["plain"]
    plain.load_state_dict({**whole(plain.state_dict()), "bias": torch.arange(float(PADDED))})
    dcp.save(layers.state_dict(), checkpoint_id=path, no_dist=layout.size == 1)


@pytest.fixture(scope="module")
def checkpoints(pools, tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for i, layout in enumerate(LAYOUTS):
        pools[layout.size].run(save_rank, layout, root / str(i))
    return root


@pytest.mark.parametrize("saved", range(len(LAYOUTS)))
@each_layout
@on_ranks("layout")
def test_checkpoint_reshards(group, checkpoints, saved, layout):
    expected = heads(Layout(), seed=0).state_dict()
    expected["plain.bias"] = torch.arange(float(PADDED))
    state = heads(layout, seed=1).state_dict()
    dcp.load(state, checkpoint_id=checkpoints / str(saved), no_dist=layout.size == 1)
    for assign in (False, True):
        fresh = heads(layout, seed=2, on_meta=assign)
        fresh.load_state_dict(state, assign=assign)
        lengths = [len(dtensor.local_part(p)[0]) for p in fresh.parameters()]
        assert lengths[:3] == [PADDED // (layout.tp * layout.fsdp)] * 3
        if layout in UNEVEN_ROWS:
            assert lengths[3:] == UNEVEN_ROWS[layout][group.rank()]
        assert_same_state(whole(fresh.state_dict()), expected)
        for layer in fresh.values():
            check_attributes(layer)


@each_layout
@on_ranks("layout")
def test_a_plain_weight_loads_into_shards(group, layout):
    """The whole, and this tensor-parallel rank's rows of it."""
    state = make(None).state_dict()
    for rows in (slice(None), slice(*layout.make().vocab_range)):
        layer = layout.make(seed=1)
        layer.load_state_dict({name: x[rows] for name, x in state.items()})
        assert_same_state(whole(layer.state_dict()), state)
    assert state["weight"].shape == (VOCAB, H)


@each_layout
@on_ranks("layout")
def test_a_weight_of_another_size_is_refused(group, layout):
    layer = layout.make()
    shapes = (500, H), (600, H), (VOCAB, H + 1), (VOCAB,), (H,)
    wrong = [{"weight": torch.zeros(shape)} for shape in shapes]
    wrong.append(layout.make(vocab_size=VOCAB + 1).state_dict())  # some ranks hold as many rows
    for state, assign in itertools.product(wrong, (False, True)):
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            layer.load_state_dict(state, assign=assign)
