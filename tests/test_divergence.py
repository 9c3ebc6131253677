"""``linear_divergence`` on one rank: values and gradients, with every option.

What is known exactly is in test_divergence_exact.py, the rest of autograd in
test_divergence_gradients.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flce_dist.testing import relative_rms
from tests.divergence_problem import (
    H_T,
    KINDS,
    WAYS,
    H,
    T,
    V,
    check,
    each_kind,
    each_way,
    problem,
    run_op,
)
from tests.outcomes import assert_same
from tests.problems import IGNORE, both, everywhere, pairwise, poisoned_memory

HALF = [torch.bfloat16, torch.float16]


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
def test_a_student_of_fewer_ids(impl: str) -> None:
    ids = torch.randperm(V + 50, generator=torch.Generator().manual_seed(3))[:V]
    given = problem(torch.bfloat16, teacher_rows=V + 50)
    check(given.changed(teacher_rows=ids, kind="forward_kl"), impl)


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
