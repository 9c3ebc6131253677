"""``linear_logprob`` over the vocabulary and over each token's own ids, on one rank."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from flce_dist import linear_logprob
from flce_dist.kernels.ids import id_sums
from flce_dist.testing import relative_rms
from tests.outcomes import assert_same
from tests.problems import both, device_of, each_dtype, poisoned_memory
from tests.score_problem import (
    SCORES,
    H,
    Scored,
    T,
    V,
    check,
    compare,
    each_over,
    problem,
    run_reference,
    run_scores,
)

WAYS = [{"schedule": "recompute"}, {"schedule": "cached"}, {"over": "ids"}]
each_way = pytest.mark.parametrize("how", WAYS, ids=str)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one id begin, end and go on in chunks of their own."""
    monkeypatch.setattr(id_sums, "CHUNK", 8)
    monkeypatch.setattr(id_sums, "_PARTS", 2)


@each_way
@each_dtype
@both
def test_scores_and_gradients(impl: str, dtype: torch.dtype, how: dict[str, Any]) -> None:
    with poisoned_memory():
        check(problem(dtype, **how), impl)
        check(problem(dtype, with_entropy=False, **how), impl)


@each_way
def test_in_fp64(how: dict[str, Any]) -> None:
    options: dict[str, Any] = {"softcap": 3.0, "logit_scale": 0.5, "temperature": 0.7, **how}
    check(problem(torch.float64, **options), "eager")
    given = problem(torch.float64, with_entropy=False, **options)
    check(given, "eager")
    if "schedule" in how:
        check(given.changed(max_logits_bytes=1000), "eager")


@both
@each_over
@pytest.mark.parametrize("options", [
    {"softcap": 3.0},
    {"logit_scale": 0.25},
    {"logit_scale": -0.25},
    {"temperature": 0.6},
    {"temperature": torch.linspace(0.2, 3, T), "softcap": 5.0, "logit_scale": 2.0},
    {"vocab_size": V, "rows": V + 10},
], ids=str)  # fmt: skip
def test_options(impl: str, over: str, options: dict[str, Any]) -> None:
    check(problem(over=over, with_entropy=over == "ids", **options), impl)


@both
def test_few_bytes_of_logits(impl: str) -> None:
    check(problem(scores=("logprob", "other"), max_logits_bytes=4000), impl)


@both
@pytest.mark.parametrize(
    ("over", "score"),
    [pair for pair in itertools.product(["vocabulary", "ids"], SCORES) if pair != ("ids", "other")],
)
def test_each_gradient_alone(impl: str, over: str, score: str) -> None:
    check(problem(over=over, scores=(score,), with_entropy=True), impl)


@both
@each_over
def test_ragged_rows(impl: str, over: str) -> None:
    """Of 9 tokens, some with no ids; with repetitions, the first and the last row."""
    counts = torch.tensor([0, 3, 1, 0, 0, 40, 2, 7, 0])
    ids = torch.randint(V, (53,), generator=torch.Generator().manual_seed(5))
    ids[:4] = torch.tensor([V - 1, 0, V - 1, 5])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    given = problem(ids=ids, offsets=offsets, over=over)
    given.hidden[counts == 0] = torch.nan
    found = check(given, impl)
    assert found["logprob"].shape == ids.shape and found["lse"].shape == (9,)
    assert over == "vocabulary" or found["logprob"][3] == 0.0  # certain among itself
    assert not found["dhidden"][counts == 0].any()


@both
@each_over
@pytest.mark.parametrize("ids", [
    torch.full((T, 3), 7),
    torch.arange(200)[:, None] % 2,
    torch.full((T, 2), -1),
    torch.empty(T, 0, dtype=torch.long),
    torch.empty(0, 4, dtype=torch.long),
    torch.stack([torch.arange(V), torch.arange(V).clamp_max(V - 2)]),
    torch.randint(V, (2, 3, 4), dtype=torch.int32, generator=torch.Generator().manual_seed(1)),
], ids=["one id all over", "K = 1", "padding", "K = 0", "T = 0", "all ids", "int32"])  # fmt: skip
def test_sets(impl: str, over: str, ids: torch.Tensor) -> None:
    scores = ("logprob", "lse") if over == "vocabulary" else None
    found = check(problem(ids=ids, over=over, scores=scores, rows=max(V, len(ids))), impl)
    if "other" in found and ids.shape == (2, V):
        assert found["other"][0] == -torch.inf and found["other"][1].isfinite()


@both
@pytest.mark.parametrize("logit", [12.0, 30.0, 60.0, -12.0, -30.0, -80.0], ids=str)
def test_a_named_id_far_from_the_others(impl: str, logit: float) -> None:
    """``other`` keeps its relative precision near 0, and far below; the last ones are rescued."""
    weight, hidden = torch.zeros(40, H), torch.zeros(2, H)
    weight[1, 0], weight[2:, 1] = logit, torch.linspace(-1, 1, 38)
    hidden[:, 0], hidden[1, 1] = 1.0, 1.0
    upstream = {"logprob": torch.tensor([[1.0], [0.5]]), "other": torch.tensor([0.3, -2.0])}
    given = Scored(hidden, weight, None, torch.ones(2, 1, dtype=torch.long), {}, upstream)
    found = run_scores(given, impl)
    gradients = {name: x for name, x in found.items() if name.startswith("d")}
    compare(gradients, given, without=SCORES)
    z = hidden.double() @ weight.double().T
    others = z.index_select(1, torch.tensor([0, *range(2, 40)])).logsumexp(1)  # no cancellation
    logprob = -(others - z[:, 1]).exp().log1p()
    other = -(z[:, 1] - others).exp().log1p()
    assert torch.allclose(found["logprob"][:, 0].double(), logprob, rtol=1e-5, atol=0)
    assert torch.allclose(found["other"].double(), other, rtol=1e-5, atol=0)


@both
@each_dtype
@pytest.mark.parametrize("trained", [("hidden", "weight"), ("hidden",)], ids=str)
@pytest.mark.parametrize(
    ("scale", "gaps"),
    [(1.0, (80, 86, 95, 100, 120)), (2.0**12, (70, 78, 88, 90, 100))],
    ids=["1", "loss scale"],
)
def test_other_so_small_that_its_gradient_would_overflow(
    impl: str, dtype: torch.dtype, trained: tuple[str, ...], scale: float, gaps: tuple[int, ...]
) -> None:
    """Two tokens whose other has a gradient, and three whose other is too small for one."""
    hidden = torch.linspace(-1, 1, 5 * H).view(5, H)
    hidden[:, 0] = torch.tensor(gaps) / 4
    weight = torch.linspace(-1, 1, 30 * H).view(30, H) / 64
    weight[:, 0] = 0
    weight[7, 0] = 4
    hidden[:, 1:] /= 16
    upstream = {"other": torch.linspace(0.5, 1, 5) * scale}
    ids = torch.full((5, 1), 7)
    for schedule in ("recompute", "cached", "in_forward")[: 4 - len(trained)]:
        given = Scored(hidden, weight, None, ids, {"schedule": schedule}, upstream, trained)
        given = given.to(dtype)
        found = run_scores(given, impl)
        assert all(x.isfinite().all() for x in (found["other"][:2], found["dhidden"]))
        assert not found["dhidden"][2:].any()
        truth = run_reference(given.to(torch.float64))["dhidden"][:2]
        limit = 1e-5 if dtype == torch.float32 else 1e-2
        assert relative_rms(found["dhidden"][:2], truth) < limit


@both
@pytest.mark.parametrize("how", WAYS[:2], ids=str)
def test_a_token_that_is_certain_of_an_id_but_its_largest(impl: str, how: dict[str, Any]) -> None:
    """So certain that all other exponentials, relative to the largest id's, are 0 beside its."""
    weight, hidden = torch.linspace(-1, 1, 40 * H).view(40, H), torch.ones(2, H) / H
    weight[3, 0], hidden[:, 0] = 200.0, torch.tensor([1.0, 0.0])
    upstream = {"logprob": torch.ones(2, 2), "entropy": torch.ones(2)}
    ids = torch.tensor([[3, 30], [5, 6]])
    check(Scored(hidden, weight, None, ids, {"with_entropy": True, **how}, upstream), impl)


@both
@each_way
@pytest.mark.parametrize("scores", [None, ("logprob", "lse")], ids=str)
def test_nothing_of_a_token_without_ids_is_read(impl: str, how: Any, scores: Any) -> None:
    given, t = problem(temperature=torch.linspace(0.2, 3, T), scores=scores, **how), torch.tensor(3)
    upstream = {name: x.index_fill(0, t, torch.nan) for name, x in given.upstream.items()}
    temperature = given.options["temperature"].index_fill(0, t, torch.nan)
    others = replace(given, upstream=upstream).changed(temperature=temperature)
    assert_same(run_scores(others, impl), check(given, impl))


@both
def test_a_token_that_is_nearly_certain_among_its_ids(impl: str) -> None:
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
    assert found["dhidden"][0, 0] == pytest.approx(-12.7 * truth.expm1().item(), rel=1e-5)


@both
@each_over
def test_gradients_that_cancel_and_sum_to_0(impl: str, over: str) -> None:
    given = problem(over=over, scores=("logprob",))
    g = given.upstream["logprob"].where(given.ids >= 0, 0.0)
    g[:, 2] = 0.0  # a repetition, or padding
    mean = g.sum(1, keepdim=True) / (given.ids >= 0).sum(1, keepdim=True).clamp_min(1)
    given.upstream["logprob"] = (g - mean).where(given.ids >= 0, 0.0)
    check(given, impl)


@both
@each_over
def test_banned_ids(impl: str, over: str) -> None:
    rows, scores = [[1, 2, 3], [2, 4, 4]], ["lse", "entropy"]
    if over == "vocabulary":  # only there is a token certain of what is not named
        rows, scores = [*rows, [2, 2, -1]], ["lse", "other"]
    given = problem(ids=torch.tensor(rows), over=over, scores=scores)
    assert given.bias is not None
    given.bias[2] = -torch.inf
    found = check(given, impl)
    assert found["logprob"][given.ids == 2].isneginf().all()
    assert found["dhidden"].isfinite().all()


@both
@each_way
@pytest.mark.parametrize("logit", [200.0, -200.0])
def test_all_ids_that_a_token_does_not_name_are_banned(
    impl: str, how: dict[str, Any], logit: float
) -> None:
    """And of those that it names the largest."""
    ids = torch.tensor([[1, 2, 3], [4, 2, 1], [1, 5, 2]])
    given = problem(ids=ids, rows=6, scores=["lse", "entropy"], **how)
    assert given.bias is not None
    given.bias.fill_(-torch.inf)[1:3] = torch.tensor([logit, logit + 1])
    found = check(given, impl)
    assert found["logprob"].isneginf().equal(ids > 2) and found["dhidden"].isfinite().all()
    assert "other" not in found or found["other"].isneginf().all()


def damages(given: Scored) -> dict[str, tuple[Scored, list[int]]]:
    """By name a problem with NaN, and the tokens whose scores are NaN then."""
    hidden, weight = given.hidden.clone(), given.weight.clone()
    hidden[5], weight[given.ids[0, 0]] = torch.nan, torch.nan
    names_row = (given.ids == given.ids[0, 0]).any(1)
    every = range(T) if given.options.get("over") != "ids" else names_row.nonzero().flatten()
    return {
        "hidden": (replace(given, hidden=hidden), [5]),
        "weight": (replace(given, weight=weight), [int(t) for t in every if t != 3]),
    }


@both
@each_way
@pytest.mark.parametrize("where", ["hidden", "weight"])
def test_nan_makes_all_scores_of_its_token_nan(impl: str, how: dict[str, Any], where: str) -> None:
    """And of no token else; gradients, too."""
    given = problem(**how)
    damaged, tokens = damages(given)[where]
    found, right = run_scores(damaged, impl), run_scores(given, impl)
    is_nan = torch.zeros(T, dtype=torch.bool)
    is_nan[tokens] = True
    padding = given.ids < 0
    assert found["logprob"].isnan().equal(is_nan[:, None] & ~padding)
    assert torch.equal(found["logprob"][~is_nan], right["logprob"][~is_nan])
    for name in ("lse", "entropy", *(["other"] if "other" in right else [])):
        assert found[name].isnan().equal(is_nan), name
        assert torch.equal(found[name][~is_nan], right[name][~is_nan]), name
    assert found["dhidden"].isnan().all(1).equal(is_nan)
    assert torch.equal(found["dhidden"][~is_nan], right["dhidden"][~is_nan])


@each_way
def test_two_runs_are_bitwise_equal(how: dict[str, Any]) -> None:
    given = problem(torch.bfloat16, **how)
    assert_same(run_scores(given, "triton"), run_scores(given, "triton"))


@both
@each_over
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dweight_is_added_to_main_grad(impl: Any, over: str, dtype: torch.dtype) -> None:
    """Once more for each backward; over ids, rows without entries stay as they are."""
    given = problem(torch.bfloat16, over=over, with_entropy=over == "ids")
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
    if over == "ids":
        untouched = torch.ones(V, dtype=torch.bool)
        untouched[given.ids[given.ids >= 0]] = False
        assert untouched.any() and not found[untouched].any()


@each_over
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_operands(over: str, frozen: str) -> None:
    given = problem(torch.float64, over=over)
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
