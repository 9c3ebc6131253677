"""Scores over the vocabulary: ``linear_logprob(..., over="vocabulary")``."""

from functools import partial
from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy_with_metrics, linear_logprob
from flce_dist.testing import relative_rms
from tests.problems import assert_same, both, device_of, each_dtype, poisoned_memory
from tests.score_problem import (
    SCORES,
    H,
    Scored,
    T,
    V,
    check,
    compare,
    on_ranks,
    problem,
    run_reference,
    run_scores,
)

over_all = partial(problem, scores=SCORES)
schedules = pytest.mark.parametrize("schedule", ["recompute", "cached"])


@schedules
@each_dtype
@both
def test_scores_and_gradients(impl: str, dtype: torch.dtype, schedule: str) -> None:
    with poisoned_memory():
        check(over_all(dtype, schedule=schedule), impl)
        check(problem(dtype, scores=("logprob", "lse", "other"), schedule=schedule), impl)


@schedules
def test_in_fp64(schedule: str) -> None:
    given = problem(
        torch.float64, scores=("logprob", "lse", "other"), softcap=3.0, logit_scale=0.5,
        temperature=0.7, schedule=schedule,
    )  # fmt: skip
    check(given, "eager")
    check(given.changed(max_logits_bytes=1000), "eager")


@both
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"logit_scale": -0.25},
        {"temperature": torch.linspace(0.2, 3, T), "softcap": 5.0, "logit_scale": 2.0},
        {"vocab_size": V, "rows": V + 10},
        {"max_logits_bytes": 4000, "schedule": "auto"},
    ],
    ids=str,
)
def test_options(impl: str, options: dict[str, Any]) -> None:
    check(problem(scores=("logprob", "other"), **{"schedule": "cached", **options}), impl)


@both
@pytest.mark.parametrize("score", SCORES)
def test_each_gradient_alone(impl: str, score: str) -> None:
    check(over_all(scores=(score,), with_entropy=True, schedule="cached"), impl)


# --- sets of ids


@both
def test_ragged_rows(impl: str) -> None:
    offsets = torch.tensor([0, 0, 3, 4, 4, 4, 44, 46, 53, 53])
    ids = torch.randint(V, (53,), generator=torch.Generator().manual_seed(5))
    ids[:4] = torch.tensor([V - 1, 0, V - 1, 5])
    given = over_all(ids=ids, offsets=offsets)
    given.hidden[offsets.diff() == 0] = torch.nan
    found = check(given, impl)
    assert not found["dhidden"][offsets.diff() == 0].any()


@both
@pytest.mark.parametrize(
    "ids",
    [
        torch.full((T, 3), 7),
        torch.arange(T)[:, None] % 2,
        torch.full((T, 2), -1),
        torch.empty(T, 0, dtype=torch.long),
        torch.empty(0, 4, dtype=torch.long),
        torch.stack([torch.arange(V), torch.arange(V).clamp_max(V - 2)]),
        torch.randint(V, (2, 3, 4), dtype=torch.int32, generator=torch.Generator().manual_seed(1)),
    ],
    ids=["one id in all rows", "K = 1", "padding only", "K = 0", "T = 0", "all ids", "3-D int32"],
)
def test_sets(impl: str, ids: torch.Tensor) -> None:
    found = check(over_all(ids=ids, scores=("logprob", "lse")), impl)
    if ids.shape == (2, V):
        assert found["other"][0] == -torch.inf and found["other"][1].isfinite()


@both
def test_one_id_is_the_log_probability_of_a_label(impl: Any) -> None:
    given = problem(torch.bfloat16, ids=torch.randint(V, (T, 1)), scores=("logprob", "lse"))
    found = run_scores(given, impl)
    assert given.bias is not None
    device = device_of(impl)
    loss = linear_cross_entropy_with_metrics(
        given.hidden.to(device), given.weight.to(device), given.ids[:, 0].to(device),
        bias=given.bias.to(device), impl=impl,
    )  # fmt: skip
    assert torch.allclose(found["logprob"][:, 0], loss.logprob.cpu(), rtol=1e-6, atol=1e-6)
    assert torch.allclose(found["lse"], loss.lse.cpu(), rtol=1e-6, atol=1e-6)


@both
@pytest.mark.parametrize("logit", [12.0, 30.0, 60.0, -12.0, -30.0, -80.0], ids=str)
def test_a_named_id_far_from_the_others(impl: str, logit: float) -> None:
    """``other`` keeps its relative precision near 0, and far below; the last ones are rescued."""
    weight = torch.zeros(40, H)
    weight[1, 0] = logit
    weight[2:, 1] = torch.linspace(-1, 1, 38)
    hidden = torch.zeros(2, H)
    hidden[:, 0], hidden[1, 1] = 1.0, 1.0
    upstream = {"logprob": torch.tensor([[1.0], [0.5]]), "other": torch.tensor([0.3, -2.0])}
    given = Scored(hidden, weight, None, torch.ones(2, 1, dtype=torch.long), {}, upstream)
    found = run_scores(given, impl)
    compare({name: x for name, x in found.items() if name.startswith("d")}, given)
    z = hidden.double() @ weight.double().T
    others = z.index_select(1, torch.tensor([0, *range(2, 40)])).logsumexp(1)  # no cancellation
    logprob = -(others - z[:, 1]).exp().log1p()
    other = -(z[:, 1] - others).exp().log1p()
    assert torch.allclose(found["logprob"][:, 0].double(), logprob, rtol=1e-5, atol=0)
    assert torch.allclose(found["other"].double(), other, rtol=1e-5, atol=0)


@both
def test_gradients_that_sum_to_0(impl: str) -> None:
    given = problem(scores=("logprob",), schedule="cached")
    g = given.upstream["logprob"].where(given.ids >= 0, 0.0)
    mean = g.sum(1, keepdim=True) / (given.ids >= 0).sum(1, keepdim=True).clamp_min(1)
    given.upstream["logprob"] = (g - mean).where(given.ids >= 0, 0.0)
    check(given, impl)


@both
def test_banned_ids(impl: str) -> None:
    given = problem(ids=torch.tensor([[1, 2, 3], [2, 4, 4], [2, 2, -1]]), scores=("lse", "other"))
    assert given.bias is not None
    given.bias[2] = -torch.inf
    found = check(given, impl)
    assert found["logprob"][2, 0] == -torch.inf and found["dhidden"].isfinite().all()


# --- bits


@pytest.mark.parametrize("schedule", ["recompute", "cached"])
def test_two_runs_are_bitwise_equal_and_so_are_replays(schedule: str) -> None:
    given = over_all(torch.bfloat16, schedule=schedule)
    first, *others = (run_scores(given, "triton") for _ in range(4))
    for other in others:
        assert_same(first, other)


def test_scores_do_not_depend_on_other_tokens_and_schedule() -> None:
    given = over_all(torch.bfloat16)
    whole = run_scores(given, "triton", tp_invariant=True, schedule="cached")
    ids, upstream = given.ids[7:8], {"logprob": torch.ones(1, 5)}
    alone = Scored(given.hidden[7:8], given.weight, given.bias, ids, given.options, upstream)
    found = run_scores(alone, "triton", tp_invariant=True, schedule="recompute")
    for name in SCORES:
        assert torch.equal(found[name][0], whole[name][7]), name


# --- ranks and main_grad


@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_on_ranks(P: int, sequence_parallel: bool) -> None:
    given = problem(torch.float64, scores=("logprob", "lse", "other"), vocab_size=V - 3)
    given.ids.clamp_(max=V - 4)
    found = on_ranks(given, P, sequence_parallel=sequence_parallel, schedule="cached")
    compare(found, given)
    assert not found["dweight"][V - 3 :].any()


@each_dtype
@pytest.mark.usefixtures("one_launch_at_a_time")
def test_interpreted_kernels_on_two_ranks(dtype: torch.dtype) -> None:
    given = over_all(dtype, rows=192, vocab_size=V)
    found = on_ranks(given, 2, "triton", sequence_parallel=True, tp_invariant=True)
    compare(found, given)
    one = run_scores(given, "triton", tp_invariant=True)
    for name in SCORES:
        assert torch.equal(found[name], one[name]), name


@both
def test_dweight_is_added_to_main_grad(impl: Any) -> None:
    given = problem(torch.bfloat16, scores=("logprob", "other"), schedule="cached")
    truth = run_reference(given.to(torch.float64))["dweight"]
    device = device_of(impl)
    weight: Any = torch.nn.Parameter(given.weight.to(device))
    weight.main_grad = torch.ones(V, H, device=device)
    assert given.bias is not None
    out = linear_logprob(
        given.hidden.to(device), weight, given.ids.to(device), bias=given.bias.to(device),
        impl=impl, accumulate_dweight=True, **given.options,
    )  # fmt: skip
    heads = [getattr(out, name) for name in given.upstream]
    torch.autograd.backward(heads, [g.to(device) for g in given.upstream.values()])
    assert weight.grad is None
    assert relative_rms(weight.main_grad.double().cpu() - 1, truth) <= 0.01


@pytest.mark.parametrize("result", ["logprob", "other", "dhidden", "dweight", "dbias"])
def test_a_wrong_result_is_noticed(result: str) -> None:
    given = over_all(torch.bfloat16)
    actual = run_scores(given, "eager")
    compare(actual, given)
    actual[result] = actual[result] * 1.05
    with pytest.raises(AssertionError, match=result):
        compare(actual, given)
