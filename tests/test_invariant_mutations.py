"""Planted mistakes in sums that must not depend on how columns are cut: a comparison must fail.

Other mistakes in the loss are in test_forward_mutations.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels import exact_sums, merge_stats, rescue
from tests.invariant_problem import check_small_terms, differing, problem, statistics
from tests.problems import interpreted

pytestmark = [interpreted, pytest.mark.usefixtures("one_launch_at_a_time")]


def test_units_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    headroom = exact_sums.headroom
    monkeypatch.setattr(exact_sums, "headroom", lambda group_v: headroom(group_v) + 16)
    with pytest.raises(AssertionError, match="not close"):
        check_small_terms(0.01, 15.0)


def test_groups_wider_than_the_shards_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flce_dist.op.statistics.INVARIANT_ROWS", 64)
    inputs = problem()
    one = statistics(inputs)
    assert differing(statistics(inputs, 8), one)
    assert differing(statistics(inputs, 4, step=64), one) == []


@triton.jit
def rounded_slice(x, bin, HEADROOM: tl.constexpr):
    return x.to(tl.float32)  # as it is: sums then round


@triton.jit
def kept_limbs(high, middle, low, bins, LIMBS: tl.constexpr):
    return high, middle, low


@triton.jit
def forgotten_limbs(high, middle, low, bins, LIMBS: tl.constexpr):
    keep = bins == 0
    return tl.where(keep, high, 0.0), tl.where(keep, middle, 0.0), tl.where(keep, low, 0.0)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """Replace a helper of the kernels wherever it is used."""

    def plant(name: str, wrong: Any) -> None:
        for owner in (exact_sums, merge_stats, rescue):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, wrong)

    yield plant


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("slice_in", rounded_slice),
        ("lower_limbs", kept_limbs),
        ("lower_limbs", forgotten_limbs),
    ],
    ids=["rounded", "kept", "forgotten"],
)
def test_sums_that_depend_on_the_order(
    planted: Callable[[str, Any], None], merged_sums: list[Tensor], name: str, wrong: Any
) -> None:
    """The remaining limbs are nearly always accurate to fp32."""
    inputs = problem()
    planted(name, wrong)
    one, many = statistics(inputs), statistics(inputs, 4)
    assert not torch.equal(merged_sums[-1], merged_sums[0])
    assert wrong is kept_limbs or differing(many, one)
