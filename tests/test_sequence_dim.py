"""``sequence_dim=1``: hidden [B, S / P, H] of each rank, labels [B, S]."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from flce_dist import LinearCrossEntropy, check_ranks, linear_cross_entropy
from flce_dist import linear_cross_entropy_with_metrics as with_metrics
from flce_dist.testing import relative_rms, run_ranks
from tests.parallel_problem import Outcome, Problem, misses, share_of

B, S = 3, 8
WEIGHTS = torch.linspace(0, 2, B * S)
MEAN = Problem(T=B * S)
NONE = Problem(T=B * S, options={"reduction": "none", "token_weight": WEIGHTS})


def of_rank(group: dist.ProcessGroup, problem: Problem) -> tuple[list[Tensor], dict[str, Any]]:
    """This rank's [hidden, weight, bias], leaves, and the keywords of a call, labels among them."""
    share = share_of(group, problem, sequence_parallel=False)
    hidden = share.hidden.view(B, S, -1).chunk(group.size(), dim=1)[group.rank()].clone()
    leaves = [x.requires_grad_() for x in (hidden, share.weight, share.bias)]
    keywords: dict[str, Any] = {
        **problem.options, "labels": share.labels.view(B, S), "bias": leaves[2],
        "vocab_size": problem.V_all, "vocab_range": share.vocab_range, "tp_group": group,
        "sequence_parallel": True, "sequence_dim": 1,
    }  # fmt: skip
    if "token_weight" in keywords:
        keywords["token_weight"] = WEIGHTS.view(B, S)
    return leaves, keywords


def step_rank(
    group: dist.ProcessGroup, problem: Problem, compiled: bool = False, **options: Any
) -> Outcome:
    leaves, keywords = of_rank(group, problem)
    check_ranks(leaves[0], leaves[1], **keywords)
    call: Any = linear_cross_entropy
    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    loss = call(leaves[0], leaves[1], **keywords, **options)
    loss.backward(problem.upstream.view(loss.shape))
    gradients: list[Any] = [x.grad for x in leaves]
    assert gradients[0].shape == leaves[0].shape
    return Outcome(loss.detach(), *gradients)


def joined(ranks: list[Outcome]) -> Outcome:
    """The ranks' outcomes, flat; a loss per token must be [B, S]."""
    loss = ranks[0].loss
    assert loss.shape in ((), (B, S)) and all(torch.equal(loss, rank.loss) for rank in ranks)
    return Outcome(
        loss.flatten() if loss.dim() else loss,
        torch.cat([rank.dhidden for rank in ranks], 1).flatten(0, 1),
        torch.cat([rank.dweight for rank in ranks]),
        torch.cat([rank.dbias for rank in ranks]),
    )


@pytest.mark.parametrize(
    ("P", "problem", "schedule"),
    [
        (2, MEAN, "in_forward"),
        (2, NONE, "cached"),
        (4, MEAN, "auto"),
        (4, NONE, "recompute"),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole(P, problem, schedule):
    ranks = run_ranks(lambda group: step_rank(group, problem, schedule=schedule), P)
    assert misses(joined(ranks), problem) == []


def test_a_flattened_problem_is_another_one():
    """What the option is for: these shapes fit, and every result is wrong."""

    def rank(group: dist.ProcessGroup) -> Outcome:
        leaves, keywords = of_rank(group, MEAN)
        keywords |= {"labels": keywords["labels"].flatten(), "sequence_dim": 0}
        loss = linear_cross_entropy(leaves[0].flatten(0, 1), leaves[1], **keywords)
        loss.backward(MEAN.upstream)
        gradients: list[Any] = [x.grad for x in leaves]
        return Outcome(loss.detach(), *gradients)

    said = misses(joined(run_ranks(rank, 2)), MEAN)
    assert [text.split(":")[0] for text in said] == ["loss", "dhidden", "dweight", "dbias"]


@pytest.mark.parametrize("problem", [MEAN, NONE])
def test_under_compile(ranks, problem):
    assert misses(joined(ranks.run(step_rank, problem, True)), problem) == []


def test_metrics_have_the_shape_of_labels():
    hidden, weight, bias, labels = (
        x.double() if x.is_floating_point() else x for x in MEAN.tensors
    )
    hidden.requires_grad_()
    whole = with_metrics(hidden.view(B, S, -1), weight, labels.view(B, S), bias=bias)
    whole.entropy.sum().backward()

    def rank(group: dist.ProcessGroup) -> tuple[Any, Any]:
        leaves, keywords = of_rank(group, MEAN)
        out = with_metrics(leaves[0], leaves[1], **keywords)
        out.entropy.sum().backward()
        return out, leaves[0].grad

    ranks = run_ranks(rank, 2)
    for out, _ in ranks:
        for mine, expected in zip(out[:4], whole[:4], strict=True):
            assert mine.shape == expected.shape and mine.is_contiguous()
            assert relative_rms(mine, expected) < 1e-5
        assert torch.equal(out.correct, whole.correct) and out.kept_share == 1
    assert hidden.grad is not None
    dhidden = torch.cat([dhidden for _, dhidden in ranks], 1).flatten(0, 1)
    assert relative_rms(dhidden, hidden.grad) < 1e-5


def test_the_layer():
    hidden, labels = MEAN.tensors[0].view(B, S, -1), MEAN.tensors[3].view(B, S)
    whole = LinearCrossEntropy(MEAN.H, MEAN.V_all)

    def rank(group: dist.ProcessGroup) -> None:
        options: dict[str, Any] = {"sequence_parallel": True, "sequence_dim": 1}
        mine = LinearCrossEntropy(MEAN.H, MEAN.V_all, tp_group=group, **options)
        mine.weight.data.copy_(whole.weight[slice(*mine.vocab_range)])
        part = hidden.chunk(group.size(), dim=1)[group.rank()]
        assert relative_rms(mine(part, labels).detach(), whole(hidden, labels).detach()) < 1e-6
        assert relative_rms(mine.logits(part), whole.logits(hidden)) < 1e-6

    run_ranks(rank, 2)


# --- DTensors


@functools.cache
def mesh_of(P: int) -> Any:
    return init_device_mesh("cpu", (P,))


def dtensor_rank(group: dist.ProcessGroup, **options: Any) -> Outcome:
    """hidden is a DTensor with Shard(1), which says by itself what sequence_dim is."""
    mesh = mesh_of(group.size())
    leaves, keywords = of_rank(group, NONE)
    keywords |= {"tp_group": mesh.get_group()}
    del keywords["sequence_dim"]
    hidden = DTensor.from_local(leaves[0].detach(), mesh, [Shard(1)]).requires_grad_()
    check_ranks(hidden, leaves[1], **keywords)
    loss = linear_cross_entropy(hidden, leaves[1], **keywords, **options)
    loss.backward(NONE.upstream.view(B, S))
    dhidden: Any = hidden.grad
    assert dhidden.placements == (Shard(1),) and dhidden.shape == (B, S, NONE.H)
    dweight, dbias = (x.grad for x in leaves[1:])
    assert dweight is not None and dbias is not None
    return Outcome(loss.detach(), dhidden.to_local(), dweight, dbias)


@pytest.mark.parametrize("options", [{}, {"sequence_dim": 1}])
def test_a_dtensor_split_along_its_second_dimension(ranks, options):
    assert misses(joined(ranks.run(dtensor_rank, **options)), NONE) == []


# --- what is refused


@pytest.mark.parametrize(
    ("hidden", "labels", "sequence_dim", "message"),
    [
        ((B, S // 2), (B, S), 0, "labels must be (6, 4) from hidden (3, 4, 32) for the tokens of "
         "all 2 ranks, got (3, 8); pass hidden [B, S / P, H], split along dimension 1, and labels "
         "[B, S] with sequence_dim=1, since flattening would give tokens other labels"),
        ((B, S // 2), (B * S,), 0, "labels [B, S] with sequence_dim=1, since flattening"),
        ((B * S // 2,), (B, S), 0, "labels [B, S] with sequence_dim=1, since flattening"),
        ((B, S // 2), (B, S // 2), 1, "labels must be (3, 8) from hidden (3, 4, 32) for the tokens "
         "of all 2 ranks, got (3, 4)"),
        ((B * S // 2,), (B * S,), 1,
         "hidden must be [B, S / P, ..., H] with sequence_dim=1 under sequence_parallel=True"),
    ],
)  # fmt: skip
def test_other_shapes_are_refused(hidden, labels, sequence_dim, message):
    def rank(group: dist.ProcessGroup) -> str:
        options: dict[str, Any] = {"sequence_parallel": True, "sequence_dim": sequence_dim}
        tensors = torch.ones(*hidden, 32), torch.ones(5, 32), torch.zeros(labels, dtype=torch.long)
        with pytest.raises(ValueError) as error:
            linear_cross_entropy(*tensors, tp_group=group, **options)
        return str(error.value)

    assert all(message in said for said in run_ranks(rank, 2))


def test_without_sequence_parallelism_nothing_is_split():
    hidden, weight, _, labels = MEAN.tensors
    hidden, labels = hidden.view(B, S, -1), labels.view(B, S)
    same = linear_cross_entropy(hidden, weight, labels, sequence_dim=1)
    assert torch.equal(same, linear_cross_entropy(hidden, weight, labels))


def test_ranks_that_split_other_dimensions_are_told():
    def rank(group: dist.ProcessGroup) -> str:
        hidden, labels = torch.ones(4, 2, 32), torch.zeros(4, 4, dtype=torch.long)
        options: dict[str, Any] = {"sequence_parallel": True, "sequence_dim": group.rank()}
        mine = labels if group.rank() else labels[:, :2].repeat(2, 1)
        with pytest.raises(ValueError) as error:
            check_ranks(hidden, torch.ones(5, 32), mine, tp_group=group, **options)
        return str(error.value)

    for said in run_ranks(rank, 2):
        assert "sequence_dim is 0 on rank 0 and 1 on rank 1" in said
