"""Optimizers beside a tp_group: saved with one P and resumed with another, as if never stopped."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from flce_dist import LinearCrossEntropy, optimizer_state, vocab_range
from flce_dist.testing import relative_rms, run_ranks
from tests.module_layouts import VOCAB, H, Layout, make, whole
from tests.on_ranks import on_ranks

LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=4), Layout(tp=2, fsdp=2)]


class Model(nn.Module):
    """The layer is not the only one of its optimizer."""

    def __init__(self, layout: Layout, seed: int):
        super().__init__()
        self.head = layout.make(seed=seed, bias=True)
        torch.manual_seed(seed)
        self.body = nn.Linear(H, H)

    def forward(self, batch: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(batch)
        hidden = torch.randn(16, H, generator=g)
        return self.head(self.body(hidden), torch.randint(VOCAB, (16,), generator=g))


def begun(layout: Layout, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(layout, seed)
    groups: list[dict[str, Any]] = [
        {"params": list(model.body.parameters())},
        {"params": list(model.head.parameters()), "weight_decay": 0.1},
    ]
    return model, torch.optim.AdamW(groups, lr=0.05, foreach=False)


def train(model: Model, optimizer: torch.optim.Optimizer, *batches: int) -> float:
    loss = torch.tensor(0.0)
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def moments_of(
    model: Model, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, torch.Tensor]]:
    state: Any = get_optimizer_state_dict(model, optimizer)
    return state["state"]


def save_rank(group: dist.ProcessGroup, layout: Layout, path: Path) -> None:
    model, optimizer = begun(layout, 0)
    train(model, optimizer, 0, 1)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.save(state, checkpoint_id=path, no_dist=layout.size == 1)


@pytest.fixture(scope="module")
def checkpoints(pools: Any, tmp_path_factory: Any) -> Path:
    root: Path = tmp_path_factory.mktemp("checkpoints")
    for i, layout in enumerate(LAYOUTS):
        pools[layout.size].run(save_rank, layout, root / str(i))
    return root


@pytest.mark.parametrize(("saved", "layout"), [
    (i, layout) for i, layout in itertools.product(range(len(LAYOUTS)), LAYOUTS)
], ids=str)  # fmt: skip
@on_ranks("layout")
def test_resumed_with_another_number_of_ranks(group, checkpoints, saved, layout):
    expected = begun(Layout(), 0)
    train(*expected, 0, 1, 2)
    last = train(*expected, 3)
    model, optimizer = begun(layout, 1)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=checkpoints / str(saved), no_dist=layout.size == 1)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    train(model, optimizer, 2)
    assert relative_rms(torch.tensor(train(model, optimizer, 3)), torch.tensor(last)) < 1e-4
    ours, theirs = moments_of(model, optimizer), moments_of(*expected)
    for name, expected_state in theirs.items():
        found = whole(ours[name])
        for key in ("exp_avg", "exp_avg_sq"):
            assert relative_rms(found[key], expected_state[key]) < 1e-4, (name, key)
        assert found["step"] == expected_state["step"] == 4


@on_ranks(2)
def test_a_plain_state_dict_is_whole_and_the_state_is_not(group):
    model, optimizer = begun(Layout(tp=2), 0)
    train(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    of_weight = saved["state"][2]["exp_avg"]  # behind the body's two
    assert isinstance(of_weight, DTensor) and of_weight.shape == (VOCAB, H)
    assert not isinstance(optimizer.state[model.head.weight]["exp_avg"], DTensor)
    fresh, other = begun(Layout(tp=2), 0)
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(saved)  # before its first step
    assert train(fresh, other, 1) == train(model, optimizer, 1)
    assert not isinstance(other.state[fresh.head.weight]["exp_avg"], DTensor)
    assert train(fresh, other, 2) == train(model, optimizer, 2)


def test_a_copy_of_the_layer_and_a_group_that_is_added():
    def rank(group: dist.ProcessGroup) -> list[int]:
        layer = copy.deepcopy(make(group))
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        optimizer.step()
        optimizer.add_param_group({"params": list(layer.parameters())})
        layer(torch.ones(2, H), torch.arange(2)).backward()
        optimizer.step()
        return list(optimizer.state_dict()["state"][1]["momentum_buffer"].shape)

    assert run_ranks(rank, 2) == [[VOCAB, H]] * 2


def test_a_copied_optimizer_has_a_whole_state_dict_from_its_own_first_step_on():
    def rank(group: dist.ProcessGroup) -> list[list[int]]:
        layer = make(group)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        layer(torch.ones(2, H), torch.arange(2)).backward()
        optimizer.step()
        _, copied = copy.deepcopy((layer, optimizer))
        shapes = []
        for steps in range(2):
            if steps:
                copied.step()
            shapes.append(list(copied.state_dict()["state"][0]["momentum_buffer"].shape))
        return shapes

    rows = [end - start for start, end in (vocab_range(VOCAB, r, 2) for r in range(2))]
    assert run_ranks(rank, 2) == [[[n, H], [VOCAB, H]] for n in rows]


def test_a_state_that_is_not_of_each_element_is_refused():
    def rank(group: dist.ProcessGroup) -> None:
        layer = LinearCrossEntropy(H, VOCAB, tp_group=group)
        optimizer = torch.optim.Adafactor(layer.parameters())
        layer(torch.ones(2, H), torch.arange(2)).backward()
        optimizer.step()
        optimizer.state_dict()

    with pytest.raises(NotImplementedError, match=r"got 'row_var' of \(25[34], 1\), which is of"):
        run_ranks(rank, 2)


def test_other_optimizers_are_left_alone():
    make(None)
    optimizer = torch.optim.SGD(make(None).parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    assert optimizer not in optimizer_state._hooked


@on_ranks(2)
def test_a_compiled_step_is_seen(group):
    layer = make(group)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(2, H), torch.arange(2)).backward()
    torch.compile(optimizer.step, backend="eager")()
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].shape == (VOCAB, H)
