"""``sequence_dim=1``: hidden [B, S / P, H] of each rank, labels [B, S]."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import LinearCrossEntropy, linear_cross_entropy
from flce_dist import linear_cross_entropy_with_metrics as with_metrics
from flce_dist.testing import relative_rms, run_ranks
from tests.parallel_problem import Problem, misses, share_of
from tests.sequence_problem import B, S, step_rank, whole

WEIGHTS = torch.linspace(0, 2, B * S)
MEAN = Problem(T=B * S)
NONE = Problem(T=B * S, options={"reduction": "none", "token_weight": WEIGHTS})


@pytest.mark.parametrize("P, problem, schedule", [(2, MEAN, "in_forward"), (4, NONE, "cached")])
def test_loss_and_gradients_are_those_of_the_whole(P, problem, schedule):
    ranks = run_ranks(lambda group: step_rank(group, problem, schedule=schedule), P)
    assert misses(whole(ranks), problem) == []


@pytest.mark.parametrize(
    ("kind", "sequence_dim"),
    [("compiled", 1), ("dtensors", 1), ("dtensors", 0)],  # whose placements say it, too
)
def test_over_gloo(ranks, kind, sequence_dim):
    outcomes = ranks.run(step_rank, NONE, kind, sequence_dim=sequence_dim)
    assert misses(whole(outcomes), NONE) == []


HIDDEN, LABELS = MEAN.tensors[0].view(B, S, -1), MEAN.tensors[3].view(B, S)


def test_metrics_have_the_shape_of_labels():
    def found(group: dist.ProcessGroup | None) -> tuple[Any, Tensor]:
        P, rank = (1, 0) if group is None else (2, group.rank())
        part = HIDDEN.chunk(P, dim=1)[rank].clone().requires_grad_()
        share = share_of(group, MEAN, sequence_parallel=False)
        share = share._replace(hidden=part, labels=LABELS)
        out = share.loss(group, MEAN, call=with_metrics, sequence_parallel=P > 1, sequence_dim=1)
        out.entropy.sum().backward()
        assert part.grad is not None
        return out, part.grad

    expected, dhidden = found(None)
    ranks = run_ranks(found, 2)
    for out, _ in ranks:
        for mine, right in zip(out[:4], expected[:4], strict=True):
            assert mine.shape == right.shape and mine.is_contiguous()
            assert relative_rms(mine, right) < 1e-5
        assert torch.equal(out.correct, expected.correct)
    assert relative_rms(torch.cat([part for _, part in ranks], 1), dhidden) < 1e-5


def test_the_layer():
    whole = LinearCrossEntropy(MEAN.H, MEAN.V_all)

    def rank(group: dist.ProcessGroup) -> None:
        options: dict[str, Any] = {"sequence_parallel": True, "sequence_dim": 1}
        mine = LinearCrossEntropy(MEAN.H, MEAN.V_all, tp_group=group, **options)
        mine.weight.data.copy_(whole.weight[slice(*mine.vocab_range)])
        part = HIDDEN.chunk(group.size(), dim=1)[group.rank()]
        assert relative_rms(mine(part, LABELS).detach(), whole(HIDDEN, LABELS).detach()) < 1e-6
        assert relative_rms(mine.logits(part), whole.logits(HIDDEN)) < 1e-6

    run_ranks(rank, 2)


def test_under_autocast_operands_may_have_two_dtypes() -> None:
    hidden = torch.randn(B, S, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(B * S).view(B, S)

    def losses(group: dist.ProcessGroup) -> list[float]:
        weight = torch.eye(16)[: B * S // 2] * (1 + group.rank())
        options: dict[str, Any] = {"tp_group": group, "sequence_parallel": True, "sequence_dim": 1}
        part = hidden.chunk(2, dim=1)[group.rank()]
        with torch.autocast("cpu", torch.bfloat16):
            mixed = linear_cross_entropy(part, weight, labels, **options)
        cast = linear_cross_entropy(part, weight.bfloat16(), labels, **options)
        return [mixed.item(), cast.item()]

    for mixed, cast in run_ranks(losses, 2):
        assert mixed == cast
