"""Scores with a frozen head: hidden alone needs a gradient, of which forward makes one vector."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_logprob
from flce_dist.kernels.logits.eager import SCRATCH_BYTES
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.reference import reference_linear_logprob
from flce_dist.schedules import choose, fit
from flce_dist.scores.in_forward import OverVocabularyInForward
from flce_dist.testing import error_budget, relative_rms
from tests.outcomes import assert_same
from tests.problems import Patch, both, each_dtype, make_inputs, poisoned_memory, sizes_of_d
from tests.score_problem import (
    H,
    Scored,
    T,
    V,
    check,
    compare,
    of_ranks,
    on_ranks,
    problem,
    run_reference,
    run_scores,
)

SCORES = ("logprob", "lse", "other")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 4.0, "logit_scale": -0.7},
    "temperature": {"temperature": torch.linspace(0.2, 3, T), "softcap": 3.0},
    "padding": {"rows": V + 10, "vocab_size": V},
    "bytes": {"max_logits_bytes": 1000},
    "named": {"schedule": "in_forward"},
}


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choose, "FROZEN_LOGITS_BYTES", 8 * V * 4)
    monkeypatch.setattr(fit, "_TILE", 8)
    yield


def frozen(dtype: torch.dtype = torch.float32, **options: Any) -> Scored:
    options.setdefault("scores", SCORES)
    given = problem(dtype, with_entropy=False, **options)
    return replace(given, trained=("hidden",))


@both
@each_dtype
@pytest.mark.parametrize("name", OPTIONS)
def test_all_gradients(name: str, dtype: torch.dtype, impl: str) -> None:
    with poisoned_memory():
        check(frozen(dtype, **OPTIONS[name]), impl)


@pytest.mark.parametrize("name", OPTIONS)
def test_in_fp64(name: str) -> None:
    check(frozen(torch.float64, **OPTIONS[name]), "eager")


@both
@pytest.mark.parametrize("score", SCORES)
def test_each_gradient_alone(score: str, impl: str) -> None:
    check(frozen(scores=(score,)), impl)


@both
@each_dtype
@pytest.mark.parametrize("logit", [12.0, 30.0, 60.0, 99.0, -12.0, -80.0], ids=str)
def test_a_named_id_far_from_the_others(logit: float, dtype: torch.dtype, impl: str) -> None:
    """At 99 the exponentials of the others are below the least normal number."""
    weight, hidden = torch.zeros(40, H), torch.zeros(2, H)
    weight[1, 0], weight[2:, 1] = logit, torch.linspace(-1, 1, 38)
    hidden[:, 0], hidden[1, 1] = 1.0, 1.0
    upstream = {"logprob": torch.tensor([[1.0], [0.5]]), "lse": torch.tensor([0.3, -2.0])}
    ids = torch.ones(2, 1, dtype=torch.long)
    given = Scored(hidden, weight, None, ids, {}, upstream, ("hidden",)).to(dtype)
    found = run_scores(given, impl)["dhidden"]
    compare({"dhidden": found}, given, without=SCORES)  # those of the reference cancel
    assert found.isfinite().all()


@both
@pytest.mark.parametrize("ids", [
    torch.full((T, 3), 7),
    torch.full((T, 2), -1),
    torch.empty(T, 0, dtype=torch.long),
    torch.empty(0, 4, dtype=torch.long),
    torch.stack([torch.arange(V), torch.arange(V).clamp_max(V - 2)]),
    torch.randint(V, (2, 3, 4), dtype=torch.int32, generator=torch.Generator().manual_seed(1)),
], ids=["one id all over", "padding", "K = 0", "T = 0", "all ids", "int32"])  # fmt: skip
def test_sets(ids: Tensor, impl: str) -> None:
    check(frozen(ids=ids, scores=("logprob", "lse"), rows=max(V, len(ids))), impl)


@both
def test_ragged_rows(impl: str) -> None:
    counts = torch.tensor([0, 3, 1, 0, 0, 40, 2, 7, 0])
    ids = torch.randint(V, (53,), generator=torch.Generator().manual_seed(5))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    given = frozen(ids=ids, offsets=offsets)
    given.hidden[counts == 0] = torch.nan
    found = check(given, impl)
    assert not found["dhidden"][counts == 0].any()


@both
def test_nan_stays_with_its_token_and_upstream_gradients_of_ignored_ones_are_not_read(
    impl: str,
) -> None:
    given = frozen()
    hidden = given.hidden.clone()
    hidden[5] = torch.nan
    upstream = {k: x.index_fill(0, torch.tensor(3), torch.nan) for k, x in given.upstream.items()}
    damaged = run_scores(replace(given, hidden=hidden, upstream=upstream), impl)["dhidden"]
    right = run_scores(given, impl)["dhidden"]
    assert damaged[5].isnan().all() and not damaged[3].any()
    others = [t for t in range(T) if t != 5]
    assert torch.equal(damaged[others], right[others])


@both
def test_banned_ids(impl: str) -> None:
    given = frozen(ids=torch.tensor([[1, 2, 3], [2, 4, 4], [2, 2, -1]]), scores=("lse", "other"))
    assert given.bias is not None
    given.bias[2] = -torch.inf
    assert check(given, impl)["dhidden"].isfinite().all()


def test_two_runs_are_bitwise_equal() -> None:
    given = frozen(torch.bfloat16)
    assert_same(run_scores(given, "triton"), run_scores(given, "triton"))


def test_a_second_backward_gives_the_same() -> None:
    given = frozen(torch.bfloat16)
    hidden = given.hidden.requires_grad_()
    out = linear_logprob(hidden, given.weight, given.ids)
    both = out.logprob.nan_to_num().sum() + 2 * out.lse.sum()
    first = torch.autograd.grad(both, hidden, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(both, hidden)[0])


def test_hidden_states_are_not_kept() -> None:
    """Of as many bytes as the vectors that are, they may go before backward."""
    given = frozen()
    found = []
    for changes in (False, True):
        leaf = given.hidden.clone().requires_grad_()
        hidden = leaf * 1.0
        out = linear_logprob(hidden, given.weight, given.ids)
        if changes:
            hidden.detach().zero_()  # an error where backward reads them
        (dhidden,) = torch.autograd.grad(out.logprob.nan_to_num().sum() + out.lse.sum(), leaf)
        found.append(dhidden)
    assert torch.equal(*(x.nan_to_num() for x in found))


def test_logits_are_computed_once_and_multiplied_once(mutate: Patch) -> None:
    sizes = sizes_of_d(mutate)
    run_scores(frozen(), "eager")
    assert sum(sizes) == T * V and len(sizes) > 2


def schedule_of(given: Scored, **options: Any) -> Any:
    hidden = given.hidden.clone().requires_grad_()
    out = linear_logprob(hidden, given.weight, given.ids, **options)
    node: Any = out.lse.grad_fn
    return node.call.schedule


def test_an_entropy_takes_the_schedules_of_a_trained_head() -> None:
    """Its gradient has a vector of its own, which would be a third GEMM for all who only log it."""
    given = frozen()
    assert isinstance(schedule_of(given), OverVocabularyInForward)
    assert not isinstance(schedule_of(given, with_entropy=True), OverVocabularyInForward)
    assert not isinstance(schedule_of(given, schedule="cached"), OverVocabularyInForward)
    with pytest.raises(NotImplementedError, match="no metrics or entropy: use schedule='rec"):
        schedule_of(given, with_entropy=True, schedule="in_forward")


def test_memory_is_a_chunk_and_the_vectors() -> None:
    shape, budget = (8192, 4096, 32), 4 << 20
    inputs = make_inputs(*shape, torch.bfloat16)
    hidden = inputs.hidden.requires_grad_()
    ids = inputs.labels.clamp_min(-1)[:, None]
    with peak_memory("cpu") as peak:
        out = linear_logprob(hidden, inputs.weight, ids, max_logits_bytes=budget)
        torch.autograd.grad(out.logprob.sum() + out.lse.sum(), hidden)
    exponentials = shape[0] * shape[1] * 2  # of all tokens, in 16 bits
    assert peak.bytes < budget + 3 * SCRATCH_BYTES < exponentials / 2


@pytest.mark.parametrize("P", [2, 3, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_on_ranks(P: int, sequence_parallel: bool) -> None:
    given = frozen(torch.float64, vocab_size=V - 3)
    given.ids.clamp_(max=V - 4)
    found = on_ranks(given, P, sequence_parallel=sequence_parallel)
    compare(found, given)


@each_dtype
@pytest.mark.usefixtures("one_launch_at_a_time")
def test_interpreted_kernels_on_two_ranks(dtype: torch.dtype) -> None:
    given = frozen(dtype)
    compare(on_ranks(given, 2, "triton", sequence_parallel=True), given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [80, 107])
def test_a_larger_shard_computes_columns_again(columns: int, dtype: torch.dtype) -> None:
    """All, or some beside those that fit; named ids are left out of them, too."""
    given = frozen(dtype, max_logits_bytes=columns * 8 * max(2, dtype.itemsize))
    given = given.changed(vocab_size=V)
    compare(on_ranks(given, 2, cuts=(110,), sequence_parallel=True), given)


@pytest.mark.parametrize("options", [{"reduce_dhidden": False}, {"reduce_in_fp32": True}], ids=str)
def test_who_sums_dhidden(options: dict[str, Any]) -> None:
    given = frozen(torch.float64)
    first, second = (x["dhidden"] for x in of_ranks(given, 2, **options))
    total = first if "reduce_in_fp32" in options else first + second
    assert relative_rms(total, run_reference(given)["dhidden"]) <= 1e-11


def test_ranks_sum_vectors_in_forward_and_named_rows_in_backward() -> None:
    whole = of_ranks(frozen(), 2, sequence_parallel=True)
    assert whole[0]["calls"] == whole[1]["calls"]
    assert sum("scatter" in call for call in whole[0]["calls"]) == 2
    assert sum("gather" in call for call in whole[0]["calls"]) == 1


def test_what_rows_of_the_weight_share_is_rounded_in_two_vectors() -> None:
    """It cancels in their difference, but not its rounding; recompute has no such vectors."""
    generator = torch.Generator().manual_seed(0)
    n, K, rows, width = 24, 8, 400, 32
    hidden = torch.randn(n, width, generator=generator).bfloat16()
    weight = torch.randn(rows, width, generator=generator) / width**0.5
    weight = (weight + 16 * torch.randn(width, generator=generator) / width**0.5).bfloat16()
    ids = torch.rand(n, rows, generator=generator).argsort(1)[:, :K]

    def dhidden(call: Any, dtype: torch.dtype, **options: Any) -> Tensor:
        leaf = hidden.to(dtype, copy=True).requires_grad_()
        logprob = call(leaf, weight.to(dtype), ids, **options)[0]
        logprob.backward(torch.full_like(logprob, 1 / K))
        assert leaf.grad is not None
        return leaf.grad

    truth = dhidden(reference_linear_logprob, torch.float64)
    eager = dhidden(reference_linear_logprob, torch.bfloat16)
    once = dhidden(linear_logprob, torch.bfloat16, schedule="recompute")
    assert error_budget(once, truth, eager).met
    twice = dhidden(linear_logprob, torch.bfloat16)
    assert not error_budget(twice, truth, eager).met
    named = weight.double()[ids].mean(1)
    eps = torch.finfo(torch.bfloat16).eps
    assert (twice.double() - truth).norm() <= eps * named.norm()
