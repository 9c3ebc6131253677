"""``sequence_dim=1``: hidden [B, S / P, H] of each rank, labels [B, S]."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flce_dist import LinearCrossEntropy, linear_cross_entropy
from flce_dist import linear_cross_entropy_with_metrics as with_metrics
from flce_dist.testing import relative_rms, run_ranks
from tests.outcomes import Outcome
from tests.parallel_problem import Problem, joined, misses, rank_step, share_of

B, S = 3, 8
WEIGHTS = torch.linspace(0, 2, B * S)
MEAN = Problem(T=B * S)
NONE = Problem(T=B * S, options={"reduction": "none", "token_weight": WEIGHTS})


def split_by_sequence(call: Any = linear_cross_entropy, *, dtensors: bool = False) -> Any:
    """``call`` as ``rank_step`` takes it: on this rank's part of [B, S, H], which is [B, S / P, H].

    dhidden is then 0 for the tokens of other ranks, and a loss per token is flat.
    """

    def of_part(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
        group = options["tp_group"]
        options = {"sequence_dim": 1, **options, "sequence_parallel": True}
        if "token_weight" in options:
            options["token_weight"] = options["token_weight"].view(B, S)
        part: Tensor = hidden.view(B, S, -1).chunk(group.size(), dim=1)[group.rank()]
        if dtensors:
            mesh = DeviceMesh.from_group(group, "cpu")
            part = DTensor.from_local(part, mesh, [Shard(1)])
            part.register_hook(is_split)
        loss = call(part, weight, labels.view(B, S), **options)
        assert loss.shape in ((), (B, S))
        return loss.flatten() if loss.dim() else loss

    return of_part


def is_split(dhidden: Tensor) -> None:
    assert isinstance(dhidden, DTensor) and dhidden.placements == (Shard(1),)
    assert dhidden.shape[:2] == (B, S)


def step_rank(group: Any, problem: Problem, kind: str = "", **options: Any) -> Outcome:
    call: Any = linear_cross_entropy
    if kind == "compiled":
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    call = split_by_sequence(call, dtensors=kind == "dtensors")
    return rank_step(group, problem, call=call, **options)


def whole(ranks: list[Outcome]) -> Outcome:
    found = joined(ranks, sequence_parallel=True)
    return found.changed(dhidden=found.dhidden.view(len(ranks), B * S, -1).sum(0))


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
