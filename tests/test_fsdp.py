"""Weights that FSDP2's fully_shard has sharded: what is right, and what is refused by name.

tests/test_module.py has the layer LinearCrossEntropy under FSDP2.
"""

import os
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.parallel import transport
from flce_dist.testing import relative_rms
from tests.on_ranks import on_ranks
from tests.parallel_problem import UNEVEN, complaint
from tests.problems import Inputs, Upstream, run_reference
from tests.test_dtensor import SPLIT, distributed, mesh_of


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


@on_ranks(4)
def test_fsdp_is_recognised_and_its_mesh_is_not_advised(group):
    """By calls outside forward, with weights that FSDP2, or nothing, has sharded."""
    mesh = mesh_of(2, 2)
    hidden, weight, _, labels = UNEVEN.tensors
    plain, both = nn.Linear(UNEVEN.H, 507, bias=False), Head(mesh["tp"], weight)
    fully_shard(plain, mesh=mesh["other"])
    fully_shard(both, mesh=mesh["other"])
    *of_fsdp, of_other = (
        complaint(linear_cross_entropy, hidden, one, labels, tp_group=tp_group)
        for one, tp_group in (
            (plain.weight, None),
            (both.weight, mesh.get_group("tp")),
            (distributed(weight, mesh["tp"], SPLIT), None),
        )
    )
    for text in of_fsdp:
        assert re.search("weight must .*; FSDP2 .* call inside forward of the module", text)
        assert "get_group" not in text and "as tp_group" not in text
    assert "FSDP2" not in of_other and "weight.device_mesh.get_group()" in of_other
    with mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_LABELS": "1"}):
        transport._have_called.clear()
        labels = labels.roll(mesh.get_local_rank("other"))
        with pytest.raises(ValueError, match=r"labels must be the same .* FSDP2"):
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
