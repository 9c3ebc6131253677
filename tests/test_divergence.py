"""``linear_divergence`` on one rank: values, gradients, options and exact cases."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_divergence
from flce_dist.testing import relative_rms
from tests.divergence_problem import (
    H_T,
    KINDS,
    H,
    Pair,
    T,
    V,
    check,
    compare,
    each_kind,
    problem,
    run_op,
    run_reference,
    upstream_of,
)
from tests.outcomes import assert_same
from tests.problems import (
    IGNORE,
    both,
    device_of,
    each_dtype,
    everywhere,
    pairwise,
    poisoned_memory,
)

WAYS: list[dict[str, Any]] = [
    {"reduction": "mean"},
    {"reduction": "sum", "max_logits_bytes": 1},
    {"reduction": "none"},
    {"reduction": "none", "schedule": "recompute"},
    {"reduction": "mean", "schedule": "cached"},
]
HALF = [torch.bfloat16, torch.float16]
each_way = pytest.mark.parametrize("how", WAYS, ids=str)


@each_way
@each_kind
@everywhere
def test_values_and_gradients(impl: str, kind: str, how: dict[str, Any]) -> None:
    with poisoned_memory():
        check(problem(kind=kind, **how), impl)


@pytest.mark.parametrize(
    ("kind", "dtype", "way"), pairwise((k, d, w) for k in KINDS for d in HALF for w in range(5))
)
@everywhere
def test_in_half_precision(impl: str, kind: str, dtype: torch.dtype, way: int) -> None:
    check(problem(dtype, kind=kind, **WAYS[way]), impl)


@each_way
@each_kind
def test_in_fp64(kind: str, how: dict[str, Any]) -> None:
    options: dict[str, Any] = {"softcap": 5.0, "temperature": 0.7, "beta": 0.2, **how}
    check(problem(torch.float64, kind=kind, teacher_logit_scale=-0.5, **options))


OPTIONS: list[dict[str, Any]] = [
    {"softcap": 3.0, "teacher_softcap": 5.0},
    {"logit_scale": -0.5, "teacher_logit_scale": 0.5},
    {"temperature": 0.6},
    {"temperature": torch.linspace(0.5, 2, T), "softcap": 4.0, "logit_scale": 2.0},
    {"temperature": 1.5, "teacher_temperature": torch.linspace(2, 0.5, T)},
    {"token_weight": torch.linspace(-1, 2, T)},
    {"rows": V + 10, "teacher_rows": V + 3, "vocab_size": V},
    {"bias": False},
]


@pytest.mark.parametrize(
    ("kind", "number", "way"),
    pairwise((k, n, w) for k in KINDS for n in range(len(OPTIONS)) for w in range(5)),
)
@everywhere
def test_options(impl: str, kind: str, number: int, way: int) -> None:
    check(problem(kind=kind, **OPTIONS[number], **WAYS[way]), impl)


@pytest.mark.parametrize("beta", [0.05, 0.9])
@both
def test_beta(impl: str, beta: float) -> None:
    check(problem(kind="jsd", beta=beta), impl)


@each_kind
@everywhere
def test_metrics(impl: str, kind: str) -> None:
    given = problem(kind=kind, reduction="none", temperature=0.8)
    given = replace(given, teacher_hidden=torch.cat([given.hidden, torch.randn(T, H_T - H)], 1))
    given.teacher_weight[:, :H] = given.weight
    found = check(given, impl, with_metrics=True)
    assert 0 < found["correct"].sum() < (given.options["labels"] != IGNORE).sum()
    assert torch.equal(found["loss"], run_op(given, impl)["loss"])


@both
def test_the_smallest_of_equally_likely_ids_is_the_best(impl: str) -> None:
    logits = torch.zeros(3, 70)
    logits[0, 5] = logits[0, 69] = logits[1, 69] = 1.0
    theirs = torch.zeros(3, 70)
    theirs[0, 5] = theirs[1, 69] = theirs[1, 3] = 1.0
    found = run_op(of_logits(logits, theirs), impl, with_metrics=True)
    assert found["correct"].tolist() == [True, False, True]


@both
def test_a_student_of_fewer_ids(impl: str) -> None:
    ids = torch.randperm(V + 50, generator=torch.Generator().manual_seed(3))[:V]
    given = problem(torch.bfloat16, teacher_rows=V + 50)
    check(given.changed(teacher_rows=ids, kind="forward_kl"), impl)


@each_dtype
@each_kind
@everywhere
def test_equal_models_are_at_0_exactly(impl: str, kind: str, dtype: torch.dtype) -> None:
    given = problem(dtype, kind=kind, reduction="none", softcap=9.0, teacher_softcap=9.0)
    own = given.hidden.nan_to_num()
    same = replace(given, teacher_hidden=own, hidden=own, teacher_weight=given.weight)
    same = replace(same, teacher_bias=same.bias)
    for found in (run_op(same, impl), run_op(same.changed(schedule="recompute"), impl)):
        assert not any(found[name].any() for name in ("loss", "dhidden", "dweight", "dbias"))


def of_logits(logits: Tensor, theirs: Tensor, **options: Any) -> Pair:
    """The pair of these logits, whose dweight is that by logits, transposed."""
    n = len(logits)
    eyes = torch.eye(n, dtype=logits.dtype), torch.eye(n, dtype=logits.dtype)
    own, other = logits.T.contiguous(), theirs.T.contiguous()
    return Pair(eyes[0], own, eyes[1], other, None, None, options)


def random_logits(seed: int, n: int = 8, spread: float = 3.0) -> Tensor:
    return torch.randn(n, V, generator=torch.Generator().manual_seed(seed)) * spread


@each_kind
@both
def test_the_gradient_of_a_token_sums_to_0(impl: str, kind: str) -> None:
    given = of_logits(random_logits(1), random_logits(2), kind=kind, reduction="sum")
    of_tokens = run_op(given, impl)["dweight"].double()
    assert (of_tokens.sum(0).abs() <= 4e-6).all() and (of_tokens.abs().sum(0) > 1e-3).all()


@both
def test_jensen_shannon_is_symmetric_and_at_most_log_2(impl: str) -> None:
    options: dict[str, Any] = {"kind": "jsd", "reduction": "none"}
    one, other = random_logits(1), random_logits(2, spread=30.0)
    found, turned = (
        run_op(of_logits(*pair, **options), impl)["loss"] for pair in ((one, other), (other, one))
    )
    assert relative_rms(found, turned) <= 1e-6
    assert (found <= math.log(2)).all()
    apart = torch.full((4, V), -200.0)
    apart[:, ::2] = 0.0
    found = run_op(of_logits(apart, -200.0 - apart, **options), impl)["loss"]
    assert relative_rms(found, torch.full((4,), math.log(2))) <= 1e-6
    assert (found <= math.log(2) * (1 + 1e-6)).all()


@both
def test_disjoint_models_have_total_variation_1(impl: str) -> None:
    apart = torch.full((4, V), -200.0)
    apart[:, ::2] = 0.0
    given = of_logits(apart, -200.0 - apart, kind="tv", reduction="none")
    found = run_op(given, impl, with_metrics=True)
    assert (
        found["loss"].allclose(torch.ones(4))
        and not found["overlap"].clamp_min(1e-6).gt(1e-6).any()
    )


@each_kind
@both
def test_columns_that_the_teacher_bans(impl: str, kind: str) -> None:
    given = problem(torch.float32, kind=kind, reduction="none")
    assert given.teacher_bias is not None and given.bias is not None
    given.teacher_bias[::3] = -torch.inf
    if kind == "reverse_kl":
        found = run_op(given, impl)["loss"]
        counted = given.options["labels"] != IGNORE
        assert (found[counted] == torch.inf).all() and not found[~counted].any()
        given.bias[::3] = -torch.inf  # by both: the value is finite again
    check(given, impl)


@both
def test_columns_that_the_student_bans(impl: str) -> None:
    given = problem(torch.float32, kind="forward_kl", reduction="none")
    assert given.bias is not None
    given.bias[5] = -torch.inf
    found = run_op(given, impl)
    counted = given.options["labels"] != IGNORE
    assert (found["loss"][counted] == torch.inf).all() and not found["loss"][~counted].any()
    assert all(found[name].isfinite().all() for name in ("dhidden", "dweight", "dbias"))
    for kind in ("reverse_kl", "jsd", "tv"):
        check(given.changed(kind=kind), impl)


@each_kind
@pytest.mark.parametrize("shift", [-30.0, 0.0, 20.0])
@both
def test_logits_far_from_0(impl: str, shift: float, kind: str) -> None:
    """A model's own constant does not matter; one logit may be far above the others."""
    one, other = random_logits(1), random_logits(2)
    one[0, 3], other[1, 7] = 90.0, 60.0
    given = of_logits(one + shift, other - shift / 2, kind=kind, reduction="none")
    found = run_op(given, impl)
    found.pop("dhidden")  # the shift times what rounding leaves of a sum that is 0
    compare(found, given, without=("dhidden",))


@each_kind
@both
def test_models_that_nearly_agree(impl: str, kind: str) -> None:
    """Sums of differences cancel, no more than in PyTorch."""
    one = random_logits(1)
    given = of_logits(one, one + random_logits(2) / 256, kind=kind, reduction="none")
    truth = run_reference(given.to(torch.float64))["loss"]
    eager = relative_rms(run_reference(given)["loss"], truth)
    assert relative_rms(run_op(given, impl)["loss"], truth) <= 2 * eager < 1e-2


@each_kind
@pytest.mark.parametrize("how", [{"max_counted": 33}, {"skip_ignored": True}], ids=str)
@everywhere
def test_tokens_that_count_alone(impl: str, how: dict[str, Any], kind: str) -> None:
    weights = torch.linspace(0.5, 2, T)
    weights[::4] = 0.0
    for way in WAYS[1:4]:
        given = problem(kind=kind, token_weight=weights, temperature=1.2, **way, **how)
        with poisoned_memory():
            check(given, impl)


def test_without_labels_all_tokens_count() -> None:
    given = problem(torch.float64, tokens=(4, 5), ignored=0.0)
    options = dict(given.options)
    labels = options.pop("labels")
    found = check(replace(given, options=options))
    assert_same(found, run_op(given, "eager"))
    assert_same(found, run_op(given.changed(labels=(labels + 10**6).int()), "eager"))


@pytest.mark.parametrize("tokens", [(0,), (3, 0)])
@both
def test_no_tokens(impl: str, tokens: tuple[int, ...]) -> None:
    for reduction in ("mean", "none"):
        check(problem(tokens=tokens, reduction=reduction), impl)


@both
def test_all_tokens_ignored(impl: str) -> None:
    given = problem(ignored=2.0)
    found = run_op(given, impl)
    assert not any(found[name].any() for name in ("loss", "dhidden", "dweight", "dbias"))


@both
def test_strides_of_any_kind(impl: str) -> None:
    given = problem()
    turned = {name: x.T.contiguous().T if x.dim() == 2 else x for name, x in given.operands.items()}
    found = run_op(replace(given, **turned), impl)
    assert_same(found, run_op(given, impl)) if impl == "triton" else check(given, impl)


def test_models_of_other_dtypes() -> None:
    """The teacher's is its own; the gradient's that of the student."""
    given = problem(torch.float64)
    for own, theirs in ((torch.float64, torch.bfloat16), (torch.bfloat16, torch.float32)):
        mixed = given.to(own)
        names = ("teacher_hidden", "teacher_weight", "teacher_bias")
        parts = {name: getattr(given, name).to(theirs) for name in names}
        found = run_op(replace(mixed, **parts), "eager")
        both_exact = replace(mixed, **{name: x.to(own) for name, x in parts.items()})
        if own == torch.float64:
            check(both_exact, "eager")
            assert relative_rms(found["dweight"], run_op(both_exact, "eager")["dweight"]) <= 1e-6
        assert found["dweight"].dtype == own


@each_kind
@pytest.mark.parametrize("schedule", ["in_forward", "cached", "recompute"])
def test_gradcheck(kind: str, schedule: str) -> None:
    given = problem(torch.float64, rows=20, tokens=(5,), kind=kind, ignored=0.0)
    hidden, weight = given.hidden.requires_grad_(), given.weight.requires_grad_()

    options: Any = {"kind": kind, "schedule": schedule}

    def value(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_divergence(
            hidden, weight, given.teacher_hidden, given.teacher_weight, **options
        )

    assert torch.autograd.gradcheck(value, (hidden, weight), fast_mode=True)


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("way", range(5))
@both
def test_one_gradient_alone(impl: Any, way: int, wanted: str) -> None:
    """As with a frozen student's head, or of one that is trained alone."""
    given = problem(**WAYS[way]).to(device_of(impl))
    leaves = {x: y.clone().requires_grad_(x == wanted) for x, y in given.operands.items()}
    loss = linear_divergence(**leaves, **given.options, impl=impl)
    loss.sum().backward()
    truth = given.to(torch.device("cpu"))
    expected = run_op(truth, impl, upstream=torch.ones(()).expand(loss.shape))
    assert [name for name, x in leaves.items() if x.grad is not None] == [wanted]
    gradient = leaves[wanted].grad
    assert gradient is not None and relative_rms(gradient.cpu(), expected[f"d{wanted}"]) <= 1e-6


@pytest.mark.parametrize("way", range(5))
def test_backward_twice(way: int) -> None:
    given = problem(torch.float64, **WAYS[way])
    hidden, weight = given.hidden.requires_grad_(), given.weight.requires_grad_()
    operands = {**given.operands, "hidden": hidden, "weight": weight}
    loss = linear_divergence(**operands, **given.options).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(2 * loss, (hidden, weight))
    assert all(torch.allclose(2 * x, y, equal_nan=True) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", range(5))
@both
def test_main_grad(impl: Any, way: int, dtype: torch.dtype) -> None:
    given = problem(dtype, **WAYS[way]).to(device_of(impl))
    expected = run_op(problem(dtype, **WAYS[way]), impl, upstream=None)["dweight"]
    weight = given.weight.clone().requires_grad_()
    holder: Any = weight
    holder.main_grad = torch.full_like(weight, 0.25, dtype=torch.float32)
    loss = linear_divergence(
        **{**given.operands, "weight": weight}, **given.options, impl=impl, accumulate_dweight=True
    )
    upstream = upstream_of(given)
    loss.backward(None if upstream is None else upstream.to(loss))
    assert weight.grad is None
    limit = 1e-6 if dtype == torch.float32 else 6e-3
    assert relative_rms(holder.main_grad.cpu(), expected + 0.25) <= limit
