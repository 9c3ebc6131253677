"""``linear_top_k`` on ranks that share the vocabulary: the ids of one rank, whatever the shards."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_logprob, linear_sample, linear_top_k
from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import run_ranks
from tests.best_problem import (
    best,
    close,
    compare,
    compare_real,
    on_ranks,
    problem,
    real_problem,
    same_bits,
)
from tests.meshes import SPLIT, WHOLE, distributed, mesh_of
from tests.on_ranks import on_ranks as on_forked_ranks
from tests.parallel_problem import complaint
from tests.problems import both

pytestmark = pytest.mark.usefixtures("one_launch_at_a_time")


@both
@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("k", [None, 1, 5])
def test_ties_are_broken_across_ranks(
    impl: str, P: int, sequence_parallel: bool, k: int | None
) -> None:
    asked = problem(k=k, vocab_size=327)
    compare(on_ranks(asked, P, impl, sequence_parallel=sequence_parallel), asked)


@both
def test_more_ids_than_a_rank_has_rows_and_ranks_without_rows(impl: str) -> None:
    """Of 9 rows the first four ranks have two each, the fifth one, the others none."""
    asked = problem(k=7, rows=9, tokens=6)
    assert asked.bias is not None
    asked.bias[1:4] = -torch.inf
    compare(on_ranks(asked, 8 if impl == "eager" else 6, impl), asked)


@both
def test_only_tokens_that_count_are_gathered(impl: str) -> None:
    asked = problem(k=3).changed(max_counted=10, temperature=torch.linspace(0.5, 1.0, 12))
    compare(on_ranks(asked, 2, impl, sequence_parallel=True), asked)


@both
def test_logits_that_differ_in_magnitude_between_ranks(impl: str) -> None:
    """Bins of exponentials that are far apart, and a rank whose columns are all banned."""
    asked = real_problem(k=3)
    assert asked.bias is not None
    asked.bias[:110] -= 70.0
    asked.bias[110:220] += 25.0
    asked.bias[220:] = -torch.inf
    asked.options["labels"].clamp_(max=219)
    compare_real(on_ranks(asked, 3, impl), asked, 1e-4)


def test_what_ranks_send() -> None:
    for k, labelled, expected in [
        (4, True, [
            "allreduce SUM float32[12]", "allreduce MAX float32[12]", "allreduce SUM float64[24]",
            "allgather int64[48]", "allreduce SUM int64[12]",
        ]),
        (1, False, [
            "allreduce MAX float32[12]", "allreduce SUM float64[24]", "allgather int64[12]",
        ]),
    ]:  # fmt: skip
        calls: list[Any] = []
        on_ranks(problem(k=k, labelled=labelled), 2, "triton", calls=calls)
        assert [call.replace("_into_tensor", "") for call in calls] == expected


@pytest.mark.parametrize("k", [None, 1, 6])
def test_the_same_bits_for_any_number_of_ranks_and_tokens(k: int | None) -> None:
    asked = real_problem(torch.bfloat16, k, rows=360, vocab_size=330)
    asked.hidden[::3] *= 9.0  # exponentials of many magnitudes
    one = best(asked, "triton", tp_invariant=True)
    for P in (2, 5):
        assert same_bits(on_ranks(asked, P, "triton", tp_invariant=True), one), P
    labels = asked.options["labels"]
    few = replace(asked, hidden=asked.hidden[4:7]).changed(labels=labels[4:7])
    found = on_ranks(few, 2, "triton", tp_invariant=True)
    assert same_bits(found, [None if x is None else x[4:7] for x in one])


@both
def test_sequences_that_are_split_along_their_second_dimension(impl: str) -> None:
    asked, P = problem(k=4), 2
    hidden, labels = asked.hidden.view(3, 4, -1), asked.options["labels"].view(3, 4)
    shaped = replace(asked, hidden=hidden).changed(labels=labels, sequence_dim=1)
    found, flat = on_ranks(shaped, P, impl, sequence_parallel=True), best(asked, impl)
    for x, of_flat in zip(found, flat, strict=True):
        close(x.flatten(0, 1), of_flat)


@pytest.mark.parametrize("tokens", [WHOLE, SPLIT], ids=str)
@on_forked_ranks(2)
def test_dtensors(group: Any, tokens: Any) -> None:
    asked = problem(rows=331)
    mesh = mesh_of(2)
    assert asked.bias is not None
    hidden, weight, bias, labels = (
        distributed(x, mesh, at)
        for x, at in (
            (asked.hidden, tokens), (asked.weight, SPLIT), (asked.bias, SPLIT),
            (asked.options["labels"], WHOLE),
        )
    )  # fmt: skip
    found = linear_top_k(
        hidden, weight, 5, labels=labels, bias=bias, tp_group=mesh.get_group(),
        sequence_parallel=tokens == SPLIT,
    )  # fmt: skip
    assert all(type(x) is torch.Tensor for x in found)
    compare(found, asked)


@pytest.mark.parametrize("changes, said", [
    ({"k": 3}, "with_labels=True)' on ranks 0, 2 and 'TopK(k=3, "),
    ({"labels": None}, "hash of labels is "),
    ({"labels": torch.ones(12, dtype=torch.long)}, "hash of labels is "),
    ({"top_p": 0.5}, "top_p=0.5"),
    ({"seed": 4}, "'Sample(seed=3)' on ranks 0, 2 and 'Sample(seed=4)' on rank 1"),
    ({"counters": torch.ones(12, dtype=torch.long)}, "hash of counters is "),
], ids=str)  # fmt: skip
def test_ranks_that_ask_for_different_things_are_told(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLCE_DIST_CHECK_RANKS", "1")
    samples = not {"seed", "counters"}.isdisjoint(changes)
    given: dict[str, Any] = {"k": 2, "labels": torch.zeros(12, dtype=torch.long)}
    if samples:
        given = {"seed": 3}
    call = linear_sample if samples else linear_top_k

    def rank(group: Any) -> str:
        operands = torch.zeros(12, 8), torch.zeros(5, 8)
        mine = given | (changes if group.rank() == 1 else {})
        return complaint(call, *operands, **mine, tp_group=group)

    (complained,) = set(run_ranks(rank, 3))
    assert said in complained, complained


@pytest.mark.parametrize("P", [2, 3])
def test_a_student_learns_from_a_teachers_best_ids(P: int) -> None:
    """Both share their vocabulary over the ranks; tokens are split, ids are those of all."""
    T, H, V, K = 12, 16, 40, 4
    g = torch.Generator().manual_seed(0)
    sizes = (T, H), (V, H), (T, 2 * H), (V, 2 * H)
    hidden, weight, *teacher = (torch.randn(x, generator=g, dtype=torch.float64) for x in sizes)

    def loss_of(hidden: Tensor, weight: Tensor, teacher: list[Tensor], **options: Any) -> Tensor:
        best = linear_top_k(teacher[0], teacher[1], K, **options)
        assert best.ids is not None and best.logprob is not None
        logprob = linear_logprob(hidden, weight, best.ids, **options).logprob
        return (best.logprob.exp() * (best.logprob - logprob)).sum(-1).mean()

    def rank(group: Any) -> tuple[Tensor, Tensor, Tensor]:
        rows, own = slice(*vocab_range(V, group.rank(), P)), slice(*vocab_range(T, group.rank(), P))
        leaves = hidden[own].clone().requires_grad_(), weight[rows].clone().requires_grad_()
        of_rows: dict[str, Any] = {"vocab_size": V, "vocab_range": (rows.start, rows.stop)}
        loss = loss_of(
            *leaves, [teacher[0][own], teacher[1][rows]], tp_group=group, sequence_parallel=True,
            **of_rows,
        )  # fmt: skip
        loss.backward()
        return loss.detach(), *(x.grad for x in leaves)  # type: ignore[return-value]

    losses, dhidden, dweight = zip(*run_ranks(rank, P), strict=True)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    target, ids = (teacher[0] @ teacher[1].T).log_softmax(-1).topk(K)
    logprob = (leaves[0] @ leaves[1].T).log_softmax(-1).gather(-1, ids)
    truth = (target.exp() * (target - logprob)).sum(-1).mean()
    truth.backward()
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    close(losses[0], truth.detach())
    close(torch.cat(dhidden), leaves[0].grad)
    close(torch.cat(dweight), leaves[1].grad)
