"""Weights that FSDP2's fully_shard has sharded: what is right, and what is refused by name.

tests/test_module.py has the layer LinearCrossEntropy under FSDP2.
"""

import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.arguments import rank_check
from flce_dist.testing import relative_rms
from tests.meshes import SPLIT, WHOLE, distributed, mesh_of
from tests.on_ranks import on_ranks
from tests.parallel_problem import UNEVEN, complaint
from tests.problems import Inputs, Upstream, run_reference


class Head(nn.Module):
    """Its weight is a DTensor by tensor-parallel rows, as torch's own parallel styles make it."""

    def __init__(self, mesh: DeviceMesh, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [SPLIT]))

    def forward(self, hidden: Tensor, labels: Tensor, **options: Any) -> Any:
        return linear_cross_entropy_with_metrics(hidden, self.weight, labels, **options)


@pytest.mark.parametrize(
    ("schedule", "autocast"), [("auto", False), ("in_forward", True), ("recompute", True)]
)
@on_ranks(4)
def test_a_weight_that_fsdp_gathers_to_a_dtensor(group, schedule, autocast):
    """FSDP2 gathers the weight for forward, and shards it again after that.

    That autocast replaces the gathered weight is no mistake; its cast shows in the rounding.
    """
    mesh = mesh_of(2, 2)
    hidden, weight, _, labels = UNEVEN.tensors
    head = Head(mesh["tp"], weight)
    fully_shard(head, mesh=mesh["other"], reshard_after_forward=True)
    options: dict[str, Any] = {"schedule": schedule, "reduction": "sum"}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = head(hidden, labels, tp_group=mesh.get_group("tp"), **options)
    assert all(type(x) is Tensor for x in out)
    out.loss.backward()
    assert isinstance(head.weight.grad, DTensor) and head.weight.grad.device_mesh.ndim == 2
    least, most = (1e-4, 1e-2) if autocast else (0.0, 1e-5)
    inputs = Inputs(hidden.double(), weight.double(), labels)
    truth = run_reference(inputs, Upstream(), reduction="sum")
    assert relative_rms(out.loss, truth["loss"]) < (1e-3 if autocast else 1e-6)
    assert least <= relative_rms(head.weight.grad.full_tensor(), truth["dweight"]) < most


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


class Model(nn.Module):
    """A model whose output layer, with its weight sharded by FSDP2, is applied outside forward."""

    def __init__(self, data: DeviceMesh | None = None, tp: DeviceMesh | None = None) -> None:
        super().__init__()
        _, weight, bias, _ = UNEVEN.tensors
        self.body = nn.Linear(UNEVEN.H, UNEVEN.H, bias=False)
        self.head = nn.Linear(UNEVEN.H, len(weight))
        rows = {"weight": weight, "bias": bias}
        self.body.weight.data.copy_(torch.eye(UNEVEN.H))
        for name, x in rows.items():
            x = x.clone() if tp is None else distribute_tensor(x, tp, [SPLIT])
            setattr(self.head, name, nn.Parameter(x))
        if data is not None:
            fully_shard(self.head, mesh=data)
            fully_shard(self, mesh=data)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.body(hidden)

    def step(self, tokens: slice, loss_of: Callable[..., Tensor]) -> list[Tensor]:
        """This rank's loss, and the whole gradients after backward."""
        hidden, _, _, labels = UNEVEN.tensors
        loss = loss_of(self.head, self(hidden[tokens]), labels[tokens])
        loss.backward()
        gradients: list[Any] = [x.grad for x in self.parameters()]
        return [loss.detach(), *map(whole, gradients)]


def unfused(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden), labels, reduction="sum")


@pytest.mark.parametrize("divisor", [None, 1.0])
@pytest.mark.parametrize(
    ("shape", "replicas", "with_tp"),
    [((2,), False, False), ((2, 2), True, False), ((2, 2), False, True)],
    ids=["fsdp", "hsdp", "fsdp and tp"],
)
def test_a_weight_outside_forward_is_gathered(pools, shape, replicas, with_tp, divisor):
    size = torch.Size(shape).numel()
    pools[size].run(gathered_rank, shape, replicas, with_tp, divisor)


def gathered_rank(group, shape, replicas, with_tp, divisor):
    """Gradients and their norm are those of data parallelism without shards, and FSDP2's own."""
    mesh = mesh_of(*shape)
    data = mesh if replicas or not with_tp else mesh["other"]
    tp_group = mesh.get_group("tp") if with_tp else None

    def fused(head: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        weight, bias = head.weight, head.bias
        assert isinstance(weight, DTensor) and weight.device_mesh.ndim == len(shape)
        return linear_cross_entropy(
            hidden, weight, labels, bias=bias, reduction="sum", tp_group=tp_group
        )

    ranks = [range(i, UNEVEN.T, data.size()) for i in range(data.size())]
    all_tokens = [slice(one.start, None, one.step) for one in ranks]
    here = data.get_rank() // (mesh.size() // data.size())
    steps = [Model().step(tokens, unfused) for tokens in all_tokens]
    loss = steps[here][0]
    expected = [torch.stack(x).sum(0) / (divisor or len(steps)) for x in zip(*steps, strict=True)]
    models = [Model(data, mesh["tp"] if with_tp else None)]
    models += [Model(data)] if not with_tp else []
    for model, loss_of in zip(models, (fused, unfused), strict=False):
        if divisor is not None:
            for module in (model.head, model):
                module.set_gradient_divide_factor(divisor)  # type: ignore[operator]
                module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        for _ in range(2):  # the second adds to the first
            found = model.step(all_tokens[here], loss_of)
        assert relative_rms(found[0], loss) < 1e-6
        for one, other in zip(found[1:], expected[1:], strict=True):
            assert relative_rms(one / 2, other) < 1e-5
        norms = [torch.cat([x.flatten() for x in every[1:]]).norm() for every in (found, expected)]
        assert relative_rms(norms[0] / 2, norms[1]) < 1e-5


@on_ranks(2)
def test_a_gathered_weight_has_the_dtype_of_hidden(group):
    """Its gradient is summed over ranks in fp32; frozen, it gets none."""
    hidden, weight, _, labels = UNEVEN.tensors
    head = nn.Linear(UNEVEN.H, len(weight), bias=False)
    head.weight.data.copy_(weight)
    fully_shard(head, mesh=mesh_of(2))
    for autocast in (False, True):
        given = hidden if autocast else hidden.bfloat16()
        head.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = linear_cross_entropy(given, head.weight, labels, reduction="sum")
        loss.backward()
        gradient: Any = head.weight.grad
        assert gradient.dtype == torch.float32
        rounded = Inputs(hidden.bfloat16().double(), weight.bfloat16().double(), labels)
        truth = run_reference(rounded, Upstream(), reduction="sum")
        assert relative_rms(loss.detach(), truth["loss"]) < 1e-5
        assert relative_rms(gradient.full_tensor(), truth["dweight"]) < 1e-2
    head.weight.requires_grad_(False)
    assert not linear_cross_entropy(hidden, head.weight, labels).requires_grad


@on_ranks(2)
def test_tokens_split_over_data_ranks_are_refused_with_the_lines_that_work(group):
    mesh, (hidden, weight, _, labels) = mesh_of(2), UNEVEN.tensors
    of_hidden: Any = distributed(hidden, mesh, SPLIT).requires_grad_()
    of_weight: Any = distributed(weight, mesh, WHOLE).requires_grad_()
    of_labels: Any = distributed(labels, mesh, SPLIT)
    call = functools.partial(linear_cross_entropy, reduction="sum")
    for one in (hidden, of_hidden):
        text = complaint(call, one, of_weight, of_labels)
        assert re.search(r"must be .*hidden.to_local\(\), labels.to_local\(\)", text)
    here = of_weight.to_local(grad_placements=[Partial()])
    call(of_hidden.to_local(), here, of_labels.to_local()).backward()
    inputs = Inputs(UNEVEN.tensors[0], UNEVEN.tensors[1], labels)
    truth = run_reference(inputs, Upstream(), reduction="sum")
    for name, x in (("dhidden", of_hidden), ("dweight", of_weight)):
        assert relative_rms(x.grad.full_tensor(), truth[name]) < 1e-5


@on_ranks(4)
def test_fsdp_is_recognised_and_its_mesh_is_not_advised(group):
    """By calls that name no tp_group, with weights that FSDP2, or nothing, has sharded."""
    mesh = mesh_of(2, 2)
    hidden, weight, _, labels = UNEVEN.tensors
    plain, both = nn.Linear(UNEVEN.H, 507, bias=False), Head(mesh["tp"], weight)
    fully_shard(plain, mesh=mesh["other"])
    fully_shard(both, mesh=mesh["other"])
    weights = both.weight, distributed(weight, mesh["tp"], SPLIT)
    of_fsdp, of_other = (complaint(linear_cross_entropy, hidden, x, labels) for x in weights)
    assert re.search("weight must .*; FSDP2 .* pass those of the same tokens as tp_group", of_fsdp)
    with mock.patch.dict(sys.modules, {"torch.distributed._composable_state": None}):
        assert "FSDP2" not in complaint(linear_cross_entropy, hidden, plain.weight, labels)
    assert "FSDP2" not in of_other and "weight.device_mesh.get_group()" in of_other
    with mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_RANKS": "1"}):
        rank_check._compared.clear()
        labels = labels.roll(mesh.get_local_rank("other"))
        with pytest.raises(ValueError, match=r"labels is .* FSDP2 shards"):
            linear_cross_entropy(hidden, plain.weight, labels, tp_group=mesh.get_group("other"))


@pytest.mark.parametrize(
    ("schedule", "with_tp"), [("in_forward", False), ("in_forward", True), ("cached", False)]
)
@on_ranks(4)
def test_a_weight_gathered_by_hand_for_forward_alone(group, schedule, with_tp):
    mesh = mesh_of(2, 2)
    hidden, weight, _, labels = UNEVEN.tensors
    head = Head(mesh["tp"], weight) if with_tp else nn.Linear(UNEVEN.H, 507, bias=False)
    fully_shard(head, mesh=mesh["other"])
    head.unshard()  # type: ignore[operator]
    tp_group = mesh.get_group("tp") if with_tp else None
    options: dict[str, Any] = {"schedule": schedule, "tp_group": tp_group}
    loss = linear_cross_entropy(hidden, head.weight, labels, **options)
    head.reshard()  # type: ignore[operator]
    text = complaint(loss.backward)
    assert re.search("weight must not be resharded .* call inside forward of the module", text)
