"""Scores over each token's own ids: ``linear_logprob(..., over="ids")``."""

from functools import partial
from typing import Any

import pytest
import torch

from flce_dist import linear_logprob
from flce_dist.testing import relative_rms
from tests.problems import assert_same, both, device_of, each_dtype, poisoned_memory
from tests.score_problem import (
    H,
    Scored,
    T,
    V,
    check,
    compare,
    problem,
    run_reference,
    run_scores,
)

over_ids = partial(problem, over="ids")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one id begin, end and go on in chunks of their own."""
    from flce_dist.kernels.scores import id_sums

    monkeypatch.setattr(id_sums, "CHUNK", 8)
    monkeypatch.setattr(id_sums, "_PARTS", 2)


@each_dtype
@both
def test_scores_and_gradients(impl: str, dtype: torch.dtype) -> None:
    with poisoned_memory():
        check(over_ids(dtype), impl)


def test_in_fp64() -> None:
    check(over_ids(torch.float64, softcap=3.0, logit_scale=0.5, temperature=0.7), "eager")


@both
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"logit_scale": 0.25},
        {"temperature": 0.6},
        {"temperature": torch.linspace(0.2, 3, T), "softcap": 5.0, "logit_scale": 2.0},
        {"vocab_size": V, "rows": V + 10},
    ],
    ids=str,
)
def test_options(impl: str, options: dict[str, Any]) -> None:
    check(over_ids(**options), impl)


@both
@pytest.mark.parametrize("score", ["logprob", "lse", "entropy"])
def test_each_gradient_alone(impl: str, score: str) -> None:
    check(over_ids(scores=(score,)), impl)


# --- sets of ids


def csr(seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of 9 tokens, some of none; with repetitions, the first and the last row."""
    counts = torch.tensor([0, 3, 1, 0, 0, 40, 2, 7, 0])
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (int(counts.sum()),), generator=g)
    ids[:4] = torch.tensor([V - 1, 0, V - 1, 5])
    return ids, torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])


@both
def test_ragged_rows(impl: str) -> None:
    ids, offsets = csr()
    given = over_ids(ids=ids, offsets=offsets)
    given.hidden[offsets.diff() == 0] = torch.nan
    found = check(given, impl)
    assert found["logprob"].shape == ids.shape and found["lse"].shape == (9,)
    assert found["logprob"][3] == 0.0  # certain among itself
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
        torch.arange(V).expand(2, V),
        torch.randint(V, (2, 3, 4), dtype=torch.int32, generator=torch.Generator().manual_seed(1)),
    ],
    ids=["one id in all rows", "K = 1", "padding only", "K = 0", "T = 0", "all ids", "3-D int32"],
)
def test_sets(impl: str, ids: torch.Tensor) -> None:
    check(over_ids(ids=ids), impl)


@both
def test_gradients_that_cancel_and_sum_to_0(impl: str) -> None:
    given = over_ids(scores=("logprob",))
    g = given.upstream["logprob"].where(given.ids >= 0, 0.0)
    g[:, 2] = 0.0  # a repetition, or padding
    mean = g.sum(1, keepdim=True) / (given.ids >= 0).sum(1, keepdim=True).clamp_min(1)
    given.upstream["logprob"] = (g - mean).where(given.ids >= 0, 0.0)
    check(given, impl)


@both
def test_a_token_that_is_nearly_certain(impl: str) -> None:
    """logprob -3e-6 keeps its relative precision, and so does its gradient."""
    weight = torch.zeros(8, H)
    weight[1, 0] = 12.7
    hidden = torch.zeros(1, H)
    hidden[0, 0] = 1.0
    ids, upstream = torch.tensor([[0, 1]]), {"logprob": torch.tensor([[0.0, 1.0]])}
    given = Scored(hidden, weight, None, ids, {"over": "ids"}, upstream)
    found = check(given, impl)
    truth = -(torch.tensor(-12.7).double().exp().log1p())
    assert found["logprob"][0, 1].double() == pytest.approx(truth.item(), rel=1e-6)


@both
def test_banned_ids(impl: str) -> None:
    given = over_ids(ids=torch.tensor([[1, 2, 3], [2, 4, 4]]), scores=("lse", "entropy"))
    assert given.bias is not None
    given.bias[2] = -torch.inf
    found = check(given, impl)
    assert found["logprob"][0, 1] == -torch.inf and found["dhidden"].isfinite().all()


def test_two_runs_are_bitwise_equal_and_so_are_replays() -> None:
    given = over_ids(torch.bfloat16)
    first, *others = (run_scores(given, "triton") for _ in range(4))
    for other in others:
        assert_same(first, other)


def test_scores_do_not_depend_on_other_tokens() -> None:
    given = over_ids(torch.bfloat16)
    whole = run_scores(given, "triton", tp_invariant=True)
    ids, upstream = given.ids[7:8], {"logprob": torch.ones(1, 5)}
    alone = Scored(given.hidden[7:8], given.weight, given.bias, ids, given.options, upstream)
    found = run_scores(alone, "triton", tp_invariant=True)
    for name in ("logprob", "lse", "entropy"):
        assert torch.equal(found[name][0], whole[name][7]), name


# --- operands and main_grad


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dweight_is_added_to_main_grad(impl: Any, dtype: torch.dtype) -> None:
    """Once more for each backward; rows without entries stay as they are."""
    given = over_ids(torch.bfloat16)
    truth = run_reference(given.to(torch.float64))["dweight"]
    device = device_of(impl)
    weight: Any = torch.nn.Parameter(given.weight.to(device))
    before = torch.randn(V, H, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    weight.main_grad = before.clone()
    assert given.bias is not None
    out = linear_logprob(
        given.hidden.to(device), weight, given.ids.to(device), bias=given.bias.to(device),
        impl=impl, accumulate_dweight=True, **given.options,
    )  # fmt: skip
    heads = [getattr(out, name) for name in given.upstream]
    upstream = [g.to(head) for head, g in zip(heads, given.upstream.values(), strict=True)]
    for _ in range(2):
        torch.autograd.backward(heads, upstream, retain_graph=True)
    assert weight.grad is None
    found = (weight.main_grad.double() - before.double()).cpu()
    budget = 0.01 + 2 * torch.finfo(dtype).eps * float(before.double().norm() / truth.norm())
    assert relative_rms(found, 2 * truth) <= budget
    untouched = torch.ones(V, dtype=torch.bool).index_fill(0, given.ids[given.ids >= 0], False)
    assert untouched.any() and torch.equal(
        weight.main_grad.cpu()[untouched], before.cpu()[untouched]
    )


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_operands(frozen: str) -> None:
    given = over_ids(torch.float64)
    truth = run_reference(given)
    leaves = {name: getattr(given, name).clone() for name in ("hidden", "weight", "bias")}
    for name, x in leaves.items():
        x.requires_grad_(name != frozen)
    out = linear_logprob(ids=given.ids, **leaves, **given.options)
    heads = [getattr(out, name) for name in given.upstream]
    torch.autograd.backward(heads, [g.double() for g in given.upstream.values()])
    for name, x in leaves.items():
        if name == frozen:
            assert x.grad is None
        else:
            assert x.grad is not None and relative_rms(x.grad, truth[f"d{name}"]) <= 1e-11


# --- planted mistakes


@pytest.mark.parametrize("result", ["logprob", "lse", "entropy", "dhidden", "dweight", "dbias"])
def test_a_wrong_result_is_noticed(result: str) -> None:
    given = over_ids(torch.bfloat16)
    actual = run_scores(given, "eager")
    compare(actual, given)
    actual[result] = actual[result] * 1.05
    with pytest.raises(AssertionError, match=result):
        compare(actual, given)
