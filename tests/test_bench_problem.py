"""The truth that the benchmark compares with."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("tyro")

from flce_dist.kernels.token_loss_formulas import RESCUE_ABOVE
from flce_dist.launch.bench import problem
from flce_dist.launch.bench.config import ShapeSpec
from flce_dist.launch.bench.problem import make_problem, make_truth
from flce_dist.reference import reference_linear_cross_entropy
from flce_dist.testing import relative_rms, run_ranks


@pytest.mark.parametrize("P", [1, 2])
def test_flagged_tokens_are_rescued_and_no_others(P):
    shape = ShapeSpec(T=20, H=64, V=60, dtype="bf16", flagged=3)
    assert shape.name.endswith("bf16 flagged=3")

    def rank(group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        problem = make_problem(shape, torch.device("cpu"), 3, group if P > 1 else None)
        return problem.hidden, problem.weight, problem.labels

    ranks = run_ranks(rank, P)
    weight = torch.cat([x[1] for x in ranks]).double()
    for hidden, _, labels in ranks:
        z = hidden.double() @ weight.T
        above = z.amax(1) - z.gather(1, labels[:, None])[:, 0]
        assert (above > RESCUE_ABOVE).nonzero()[:, 0].tolist() == [0, 6, 13]


@pytest.mark.parametrize("P", [1, 2])
def test_the_truth_is_the_textbook_in_fp64(P, monkeypatch):
    monkeypatch.setattr(problem, "CHUNK_BYTES", 8 * 30 * 7)  # chunks of 7 or 14 tokens
    shape = ShapeSpec(T=24, H=8, V=60, dtype="fp32")

    def rank(group: dist.ProcessGroup) -> dict[str, Any]:
        problem = make_problem(shape, torch.device("cpu"), 3, group if P > 1 else None)
        truth = make_truth(problem, gradients=True)
        return {**vars(truth), "hidden": problem.hidden, "weight": problem.weight,
                "labels": problem.labels}  # fmt: skip

    ranks = run_ranks(rank, P, backend="gloo")
    hidden = ranks[0]["hidden"].double().requires_grad_()
    weight = torch.cat([x["weight"] for x in ranks]).double().requires_grad_()
    (loss, *_) = reference_linear_cross_entropy(hidden, weight, ranks[0]["labels"])
    gradients = torch.autograd.grad(loss, (hidden, weight))
    dweight = torch.cat([x["dweight"] for x in ranks])
    for x in ranks:
        assert torch.equal(x["hidden"], ranks[0]["hidden"])
        assert x["loss"] == pytest.approx(loss.item(), rel=1e-13)
        assert relative_rms(x["dhidden"], gradients[0]) < 1e-13
    assert relative_rms(dweight, gradients[1]) < 1e-13
