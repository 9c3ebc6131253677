"""DTensors of both models as arguments of ``linear_divergence``, on forked ranks."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from flce_dist import linear_divergence
from flce_dist.testing import relative_rms
from tests.divergence_problem import V, problem, run_reference
from tests.meshes import SPLIT, WHOLE, distributed, mesh_of
from tests.on_ranks import on_ranks


@pytest.mark.parametrize(("P", "tokens"), [(2, WHOLE), (2, SPLIT), (4, SPLIT)], ids=str)
@on_ranks("P")
def test_gradients_come_in_kind(group, P, tokens):
    """Of an uneven vocabulary; other dimensions of the mesh are replicated."""
    given = problem(torch.float64, rows=V + 1, tokens=(24,), kind="jsd")
    truth = run_reference(given)
    mesh = mesh_of(*[2] * (P // 2))
    operands: dict[str, Any] = {
        name: distributed(x, mesh, tokens if name.endswith("hidden") else SPLIT)
        for name, x in given.operands.items()
    }
    for name in ("hidden", "weight", "bias"):
        operands[name].requires_grad_()
    loss = linear_divergence(
        **operands,
        tp_group=mesh.get_group(mesh.ndim - 1),
        kind="jsd",
        sequence_parallel=tokens == SPLIT,
        labels=distributed(given.options["labels"], mesh, WHOLE),
    )
    assert type(loss) is torch.Tensor and relative_rms(loss, truth["loss"]) <= 1e-11
    loss.backward()
    for name in ("hidden", "weight", "bias"):
        x = operands[name]
        assert isinstance(x.grad, DTensor) and x.grad.placements == x.placements
        assert relative_rms(x.grad.full_tensor(), truth[f"d{name}"]) <= 1e-11, name


@on_ranks(2)
def test_a_teacher_of_other_placements_is_refused_by_name(group):
    given = problem(tokens=(24,))
    start = V // 2 * group.rank()
    own = given.weight[start : start + V // 2]
    theirs = distribute_tensor(given.teacher_weight, mesh_of(2), [WHOLE])
    with pytest.raises(ValueError, match="teacher_weight must be a plain tensor or a DTensor"):
        linear_divergence(given.hidden, own, given.teacher_hidden, theirs, tp_group=group)


@on_ranks(2)
def test_rows_of_a_teacher_are_plain(group):
    given = problem(tokens=(24,))
    mesh = mesh_of(2)
    rows = distribute_tensor(torch.arange(V), mesh, [WHOLE])
    operands = given.hidden, given.weight, given.teacher_hidden, given.teacher_weight
    with pytest.raises(ValueError, match=r"got a DTensor: pass teacher_rows.to_local\(\)"):
        linear_divergence(*operands, teacher_rows=rows)
