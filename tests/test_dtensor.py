"""DTensors as arguments: supported placements give right gradients, others raise."""

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from flce_dist import LinearCrossEntropy, api, linear_cross_entropy, state_dtensors
from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import relative_rms
from tests.meshes import ROWS, SPLIT, WHOLE, distributed, mesh_of, operands
from tests.on_ranks import on_ranks
from tests.outcomes import Outcome
from tests.parallel_problem import EVEN, PADDED, TINY, UNEVEN, Problem, complaint, misses

NONE = Problem(options={"reduction": "none"})


def step_rank(
    group: dist.ProcessGroup, shape: tuple[int, ...], problem: Problem, placements: dict[str, Any],
    **options: Any,
) -> Outcome:  # fmt: skip
    """Loss and joined gradients of all ranks, after checks of their types and placements."""
    mesh = mesh_of(*shape)
    tensors = operands(mesh, problem, **placements)
    tp_group = mesh.get_group(mesh.ndim - 1) if placements.get("rows", True) else None
    options = {"vocab_size": problem.V_all, "tp_group": tp_group, **problem.options, **options}
    if tp_group is not None and "weight" not in placements:
        options["vocab_range"] = vocab_range(problem.n_rows, tp_group.rank(), tp_group.size())
    loss = linear_cross_entropy(**tensors, **options)
    assert type(loss) is Tensor
    loss.backward(problem.upstream)

    gradients = []
    for name in ("hidden", "weight", "bias"):
        x, dx = tensors[name], tensors[name].grad
        assert dx is not None and type(dx) is type(x) and dx.shape == x.shape
        if isinstance(x, DTensor) and isinstance(dx, DTensor):
            share = name == "hidden" and not options.get("reduce_dhidden", True)
            assert dx.device_mesh is x.device_mesh
            assert dx.placements == ((Partial(),) if share else x.placements)
        elif name != "hidden" and tp_group is not None:
            dx = state_dtensors.whole_of_rows(dx, problem.n_rows, tp_group)
        gradients.append(dx.full_tensor() if isinstance(dx, DTensor) else dx)
    return Outcome.of(loss, *gradients)


ALL = {**ROWS, "hidden": WHOLE, "labels": WHOLE}
SEQUENCE = {**ALL, "hidden": SPLIT}


@pytest.mark.parametrize("schedule", ["recompute", "in_forward"])
@pytest.mark.parametrize(("shape", "problem", "placements"), [
    ((2,), EVEN, ALL),
    ((2,), EVEN, SEQUENCE),
    ((4,), UNEVEN, ALL),
    ((4,), UNEVEN, SEQUENCE),
    ((4,), PADDED, ROWS),
    ((4,), TINY, SEQUENCE),
    ((4,), UNEVEN, {"hidden": WHOLE}),
    ((4,), UNEVEN, {"weight": SPLIT}),
    ((2, 2), UNEVEN, SEQUENCE),
    ((2, 2), UNEVEN, ALL),
    ((1, 2), UNEVEN, SEQUENCE),
    ((2, 1), UNEVEN, SEQUENCE),
    ((2,), UNEVEN, {"rows": False, "weight": WHOLE, "bias": WHOLE, "hidden": WHOLE}),
    ((2,), UNEVEN, {"rows": False, "weight": WHOLE, "bias": WHOLE}),
    ((1,), UNEVEN, {"rows": False, "weight": SPLIT, "bias": SPLIT}),
])  # fmt: skip
def test_gradients_come_in_kind(pools, shape, problem, placements, schedule):
    options = {"schedule": schedule, "sequence_parallel": placements.get("hidden") == SPLIT}
    pool = pools[torch.Size(shape).numel()]
    ranks = pool.run(step_rank, shape, problem, placements, **options)
    assert all(misses(rank, problem) == [] for rank in ranks)
    assert all(torch.equal(rank.loss, ranks[0].loss) for rank in ranks)


@pytest.mark.parametrize("placements", [ALL, ROWS])
def test_a_sum_left_to_dtensor_is_partial(pools, placements):
    """With reduce_dhidden=False each rank has a share; DTensor sums those of a DTensor."""
    ranks = pools[2].run(step_rank, (2,), UNEVEN, placements, reduce_dhidden=False)
    if "hidden" not in placements:
        total = ranks[0].dhidden + ranks[1].dhidden
        ranks = [rank.changed(dhidden=total) for rank in ranks]
    assert all(misses(rank, UNEVEN) == [] for rank in ranks)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "partial hidden": ({"hidden": Partial()}, {}, r"hidden must be .* Replicate\(\) .*Partial"),
    "hidden by H": ({"hidden": Shard(1)}, {}, "hidden must be a plain tensor or a DTensor with R"),
    "tokens split without sequence_parallel": (
        {"hidden": SPLIT}, {}, r"hidden must be .* over tp_group's ranks .*; sequence_parallel is F"
    ),
    "whole hidden under sequence_parallel": (
        {"hidden": WHOLE}, {"sequence_parallel": True}, "hidden must .* sequence_parallel is True"
    ),
    "shares over no dimension of the mesh": (
        {"hidden": WHOLE, "shape": (2, 2)}, {"tp_group": "all", "reduce_dhidden": False},
        r"hidden must .* ranks \[0, 1, 2, 3\] .* reduce_dhidden False"
    ),
    "partial weight": ({"weight": Partial()}, {}, "weight must be .*Partial"),
    "weight by H": ({"weight": Shard(1)}, {}, r"weight must be .* got .*Shard\(dim=1\)"),
    "whole weight over tp_group": ({"weight": WHOLE}, {}, "weight must be .* tp_group's ranks"),
    "rows split over no group": (
        {"weight": SPLIT, "bias": SPLIT}, {"tp_group": None}, "weight must .*; pass .* as tp_group"
    ),
    "bias over no group": (
        {"weight": WHOLE, "bias": SPLIT}, {"tp_group": None}, "bias must .*; pass .* as tp_group"
    ),
    "split labels": ({"labels": SPLIT}, {}, "labels must be a plain tensor or a DTensor with R"),
    "split token_weight": ({"token_weight": SPLIT}, {}, "token_weight must be a plain tensor or"),
    "too few rows": (ROWS, {"vocab_size": 508}, r"vocab_size must be within \[1, 507\] .* 508"),
    "other rows": (ROWS, {"vocab_range": (0, 1)}, r"vocab_range must be None .* got \(0, 1\)"),
    "a longer bias": (  # of which rank 0 holds as many rows
        {**ROWS, "bias_rows": 508}, {}, r"bias must be \[V\] with V = 507 from weight, got \(508,\)"
    ),
    "uneven tokens": ({**SEQUENCE, "T": 25}, {"sequence_parallel": True}, "hidden must .* of 2"),
    "options": (ROWS, {"label_smoothing": "no"}, "label_smoothing must be a float"),
    "no group": (ROWS, {"tp_group": "tp"}, "tp_group must be None or a torch.distributed.Process"),
    "rows over another dimension": ({**ROWS, "shape": (2, 2)}, {}, "weight must be .* ranks"),
    "ranks in another order": ({**ROWS, "shape": None}, {}, r"weight must be .* ranks \[0, 1\]"),
}  # fmt: skip


def refused_rank(
    group: dist.ProcessGroup, placements: dict[str, Any], options: dict[str, Any]
) -> str:
    """The error of the op."""
    shape = placements.get("shape", (2,))
    mesh = mesh_of(*shape) if shape else DeviceMesh("cpu", [1, 0])
    tensors = operands(mesh, UNEVEN.changed(T=placements.get("T", 24)), **placements)
    if "token_weight" in placements:
        weights = torch.ones(len(tensors["labels"]))
        tensors["token_weight"] = distributed(weights, mesh, placements["token_weight"])
    if "bias_rows" in placements:
        tensors["bias"] = distributed(torch.ones(placements["bias_rows"]), mesh, SPLIT)
    options = {"tp_group": mesh.get_group(0), **options}
    if options["tp_group"] == "all":
        options["tp_group"] = group
    return complaint(linear_cross_entropy, **tensors, **options)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(pools, case):
    placements, options, message = REFUSED[case]
    size = torch.Size(placements.get("shape") or (2,)).numel()
    for said in pools[size].run(refused_rank, placements, options):
        assert re.search(message, said), said


@pytest.mark.parametrize("local", [False, True])
@on_ranks(2)
def test_what_is_in_flight_is_waited_for(group, local):
    """dhidden through a gather that nothing has waited for yet."""
    tensors = operands(mesh_of(2), UNEVEN, **SEQUENCE)
    leaf = tensors["hidden"]
    hidden = (1.0 * leaf).redistribute(placements=[WHOLE], async_op=True)
    assert isinstance(hidden.to_local(), AsyncCollectiveTensor)
    tensors["hidden"] = hidden.to_local(grad_placements=[WHOLE]) if local else hidden
    with mock.patch.object(api, "prepare", wraps=api.prepare) as prepare:
        loss = linear_cross_entropy(**tensors, tp_group=group)
    given = prepare.call_args.args[0].hidden
    assert type(given) is Tensor and given.data_ptr()
    loss.backward(UNEVEN.upstream)
    expected = UNEVEN.textbook(torch.float64).dhidden
    assert relative_rms(leaf.grad.full_tensor(), expected) < 1e-5


SPLITS: dict[str, Placement] = {"none": Replicate(), "first": Shard(0), "second": Shard(1)}


@on_ranks(2)
def test_logits_of_a_layer_take_hidden_states_as_its_loss_does(group):
    mesh = mesh_of(2)
    torch.manual_seed(0)
    hidden = torch.randn(4, 6, 8)
    placed = {name: distributed(hidden, mesh, x) for name, x in SPLITS.items()}
    for sequence_parallel, names in ((False, ["none"]), (True, ["first", "second"])):
        layer = LinearCrossEntropy(8, 37, tp_group=group, sequence_parallel=sequence_parallel)
        expected = hidden @ layer.state_dict()["weight"].full_tensor().T
        for name in names:
            for gather in (True, False):
                z = layer.logits(placed[name], gather=gather)
                here = expected if gather else expected[..., slice(*layer.vocab_range)]
                assert type(z) is Tensor and relative_rms(z, here) < 1e-6
        for name in placed.keys() - names:
            assert complaint(layer.logits, placed[name]).startswith(
                "hidden must be a plain tensor or a DTensor with "
            )
    uneven = distributed(hidden[:3], mesh, SPLITS["first"])
    assert complaint(layer.logits, uneven).startswith("hidden must have a multiple of 2 in its fir")
