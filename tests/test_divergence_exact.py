"""What is known of a divergence without a reference: zeros, limits, ties, banned columns."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist.testing import relative_rms
from tests.divergence_problem import (
    METRICS,
    Pair,
    V,
    check,
    compare,
    each_kind,
    of_ranks,
    problem,
    run_op,
    run_reference,
    upstream_of,
)
from tests.outcomes import Outcome
from tests.problems import IGNORE, both, each_dtype, everywhere


def of_logits(logits: Tensor, theirs: Tensor, **options: Any) -> Pair:
    """The pair of these logits, whose dweight is that by logits, transposed."""
    hidden = torch.eye(len(logits), dtype=logits.dtype)
    weight = logits.T.contiguous()
    teacher_weight = theirs.T.contiguous()
    return Pair(hidden, weight, hidden.clone(), teacher_weight, None, None, options)


def random_logits(seed: int, n: int = 8, spread: float = 3.0) -> Tensor:
    return torch.randn(n, V, generator=torch.Generator().manual_seed(seed)) * spread


def disjoint(**options: Any) -> Pair:
    """4 tokens, to which either model gives the ids that the other one does not."""
    logits = torch.full((4, V), -200.0)
    logits[:, ::2] = 0.0
    return of_logits(logits, -200.0 - logits, **options)


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


@both
def test_the_smallest_of_equally_likely_ids_is_the_best(impl: str) -> None:
    logits = torch.zeros(3, 70)
    logits[0, 5] = logits[0, 69] = logits[1, 69] = 1.0
    theirs = torch.zeros(3, 70)
    theirs[0, 5] = theirs[1, 69] = theirs[1, 3] = 1.0
    found = run_op(of_logits(logits, theirs), impl, with_metrics=True)
    assert found["correct"].tolist() == [True, False, True]


@each_kind
@both
def test_the_gradient_of_a_token_sums_to_0(impl: str, kind: str) -> None:
    given = of_logits(random_logits(1), random_logits(2), kind=kind, reduction="sum")
    of_tokens = run_op(given, impl)["dweight"].double()
    assert (of_tokens.sum(0).abs() <= 4e-6).all() and (of_tokens.abs().sum(0) > 1e-3).all()


@both
def test_jensen_shannon_is_symmetric_and_at_most_log_2(impl: str) -> None:
    options: dict[str, Any] = {"kind": "jsd", "reduction": "none"}
    one = random_logits(1)
    other = random_logits(2, spread=30.0)
    found = run_op(of_logits(one, other, **options), impl)["loss"]
    turned = run_op(of_logits(other, one, **options), impl)["loss"]
    assert relative_rms(found, turned) <= 1e-6
    assert (found <= math.log(2)).all()
    found = run_op(disjoint(**options), impl)["loss"]
    assert relative_rms(found, torch.full((4,), math.log(2))) <= 1e-6
    assert (found <= math.log(2) * (1 + 1e-6)).all()


@both
def test_disjoint_models_have_total_variation_1(impl: str) -> None:
    found = run_op(disjoint(kind="tv", reduction="none"), impl, with_metrics=True)
    assert found["loss"].allclose(torch.ones(4))
    assert (found["overlap"] <= 1e-6).all()


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


def gradients_of_forward_kl(given: Pair) -> dict[str, Tensor]:
    """By their formula: the student's probabilities minus the teacher's, in fp64."""
    x = given.to(torch.float64)
    upstream = upstream_of(given)
    assert x.bias is not None and x.teacher_bias is not None and upstream is not None
    p = (x.hidden @ x.weight.T + x.bias).softmax(1)
    q = (x.teacher_hidden @ x.teacher_weight.T + x.teacher_bias).softmax(1)
    counted = (given.options["labels"] != IGNORE)[:, None]
    d = ((p - q) * upstream[:, None]).where(counted, 0.0)
    hidden = x.hidden.where(counted, 0.0)
    return {"dhidden": d @ x.weight, "dweight": d.T @ hidden, "dbias": d.sum(0)}


@both
def test_columns_that_the_student_bans(impl: str) -> None:
    given = problem(torch.float32, kind="forward_kl", reduction="none")
    assert given.bias is not None
    given.bias[5] = -torch.inf
    found = run_op(given, impl)
    counted = given.options["labels"] != IGNORE
    assert (found["loss"][counted] == torch.inf).all() and not found["loss"][~counted].any()
    for name, exact in gradients_of_forward_kl(given).items():  # PyTorch's are NaN
        assert relative_rms(found[name], exact) < 2e-6, name
    for kind in ("reverse_kl", "jsd", "tv"):
        check(given.changed(kind=kind), impl)


@each_kind
@pytest.mark.parametrize("shift", [-30.0, 0.0, 20.0])
@both
def test_logits_far_from_0(impl: str, shift: float, kind: str) -> None:
    """A model's own constant does not matter; one logit may be far above the others."""
    one = random_logits(1)
    other = random_logits(2)
    one[0, 3] = 90.0
    other[1, 7] = 60.0
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


def without_a_distribution() -> dict[str, tuple[str, float]]:
    """By name the operand of a token that gets a number, and the number."""
    return {
        f"{model} {what}": (f"{operand}{of}", number)
        for model, operand in (("student", ""), ("teacher", "teacher_"))
        for what, of, number in (
            ("all banned", "bias", -torch.inf),
            ("NaN", "hidden", torch.nan),
            ("inf", "hidden", torch.inf),
        )
    }


@each_kind
@both
@pytest.mark.usefixtures("one_launch_at_a_time")
@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.parametrize("name", without_a_distribution())
def test_tokens_of_which_a_model_has_no_distribution(
    impl: str, kind: str, P: int, name: str
) -> None:
    """No divergence is 0 then, and nothing overlaps; tokens beside them keep their bits."""
    right = problem(kind=kind, reduction="none", tokens=(6,), ignored=0.0)
    operand, number = without_a_distribution()[name]
    broken = getattr(right, operand).clone()
    tokens = slice(None)
    if operand.endswith("bias"):
        broken[:] = number
    else:
        broken[2, 5] = number
        tokens = slice(2, 3)
    damaged = replace(right, **{operand: broken})

    def found(given: Pair) -> Outcome:
        if P == 1:
            return run_op(given, impl, with_metrics=True, tp_invariant=impl == "triton")
        ranks = of_ranks(given, P, impl, with_metrics=True)
        assert all(torch.equal(ranks[0][x].isnan(), ranks[1][x].isnan()) for x in METRICS)
        return ranks[0]

    results, before = found(damaged), found(right)
    truth = run_reference(damaged.to(torch.float64))
    others = [t for t in range(6) if t not in range(6)[tokens]]
    for result in ("loss", *METRICS):
        assert torch.equal(results[result][others], before[result][others]), result
        assert torch.equal(results[result].isnan(), truth[result].isnan()), result
    assert results["loss"][tokens].isnan().all() and results["overlap"][tokens].isnan().all()
    assert not results["correct"][tokens].any() and not truth["correct"][tokens].any()
    assert torch.equal(results["dhidden"][others], before["dhidden"][others])
