"""Statistics are the same bits for any number of ranks, however columns and tokens are cut."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy
from flce_dist import linear_cross_entropy_with_metrics as with_metrics
from flce_dist.kernels.logits import launching
from flce_dist.testing import run_ranks
from tests.invariant_problem import (
    Statistics,
    T,
    check_small_terms,
    differing,
    leading,
    problem,
    shards,
    statistics,
)
from tests.parallel_problem import complaint, plan_sizes
from tests.problems import Inputs, each_dtype, interpreted

pytestmark = pytest.mark.usefixtures("one_launch_at_a_time")

RANKS = (1, 2, 4, 8)
ALL = {"softcap": 30.0, "label_smoothing": 0.1, "z_loss_weight": 1e-3, "logit_scale": 0.7}


def check_cuts(
    inputs: Inputs,
    options: dict[str, Any],
    *,
    ranks: tuple[int, ...],
    budgets: tuple[int, ...],
    part_bytes: tuple[int, ...],
    fewer: tuple[int, ...],
    merged_sums: Sequence[Tensor] = (),
) -> None:
    one = statistics(inputs, schedule="recompute", **options)
    assert all(x.isfinite().all() for x in one)
    for P in RANKS[1:]:
        assert differing(statistics(inputs, P, **options), one) == [], f"{P} ranks"
        if merged_sums:
            assert torch.equal(merged_sums[-1], merged_sums[0]), f"sums of {P} ranks"

    schedules: list[dict[str, Any]] = [{"max_logits_bytes": budget} for budget in budgets]
    keeps_gradients = not ("softcap" in options and "label_smoothing" in options)
    if keeps_gradients:
        schedules += [{"schedule": "cached"}]
    for P, schedule in itertools.product(ranks, schedules):
        many = statistics(inputs, P, gradients=True, **schedule, **options)
        assert differing(many, one) == [], f"{P} ranks, {schedule}"
    for P in ranks if keeps_gradients else ():
        summed = {"reduction": "sum" if P == 1 else "mean", **options}
        total = statistics(inputs, schedule="recompute", **summed)
        chunks: dict[str, Any] = {"schedule": "in_forward", "gradients": True, **summed}
        for budget in (None, 1):
            many = statistics(inputs, P, max_logits_bytes=budget, **chunks)
            assert differing(many, total) == [], f"{P} ranks, chunks of {budget} bytes"

    for n in fewer:
        few = statistics(leading(inputs, n), 2, **options)
        assert differing(few, Statistics(*(x[:n] for x in one))) == [], f"{n} tokens"
    for P, nbytes in itertools.product(ranks, part_bytes):
        with mock.patch.object(launching, "MAX_GROUP_PART_BYTES", nbytes):
            many = statistics(inputs, P, **options)
        assert differing(many, one) == [], f"{P} ranks, segments of {nbytes} bytes"


@interpreted
@pytest.mark.parametrize(
    ("dtype", "options", "ranks"),
    [(torch.float32, {}, 1), (torch.bfloat16, {"softcap": 30.0}, 2), (torch.float16, ALL, 1)],
)
@plan_sizes(tile=32, min_window=32)
def test_any_cut(merged_sums, dtype, options, ranks):
    """Windows of 32 and 64 columns, chunks of 32 and 8 tokens, segments of 1 and 3 tiles."""
    budgets, tile = (4 * T * 64, 4 * T * 288), 4 * (1 + 2 * 3) * T
    check_cuts(
        problem(dtype), options, ranks=(ranks,), budgets=budgets, part_bytes=(tile, 3 * tile),
        fewer=(7,), merged_sums=merged_sums,
    )  # fmt: skip


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"label_smoothing": 0.1}, ALL], ids=str)
def test_any_cut_on_a_gpu(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The compiler sees other kernels where columns are cached, and other tiles for few tokens."""
    T, V_all, rows = 1000, 32060, 32064
    inputs = problem(dtype, T, 512, V_all, rows).to(torch.device("cuda"))
    options = {"V_all": V_all, **options}
    check_cuts(
        inputs, options, ranks=(1, 2), budgets=(2 * T * 12800,), part_bytes=(1 << 20,),
        fewer=(50, 100),
    )  # fmt: skip


@interpreted
def test_bits_rest_on_no_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A BLAS may round a column by its place in the tile, on some CPUs and not on others."""
    monkeypatch.delattr("numpy.matmul")
    assert statistics(problem(), 2).loss.isfinite().all()


@interpreted
def test_ranks_without_rows() -> None:
    inputs = problem(V_all=90, rows=96)
    one = statistics(inputs, V_all=90)
    assert len([r for r in shards(8, 96) if r[0] == r[1]]) == 5
    assert differing(statistics(inputs, 8, V_all=90), one) == []


@interpreted
@pytest.mark.parametrize("call, rows", [(linear_cross_entropy, 4), (with_metrics, 7)])
def test_what_ranks_send(call, rows):
    hidden, weight = problem().hidden, problem().weight

    def rank(tp_group: Any) -> list[str]:
        mine = weight[:128].chunk(2)[tp_group.rank()]
        options = {"label_smoothing": 0.1, "impl": "triton", "tp_invariant": True}
        call(hidden[:9], mine, torch.arange(9), tp_group=tp_group, **options)
        return tp_group.calls

    statistics = ["allreduce SUM float32[9]", "allreduce MAX float32[9]"]
    for calls in run_ranks(rank, 2):
        assert calls == [*statistics, f"allreduce SUM float64[{rows * 9}]"]


@interpreted
@pytest.mark.parametrize("at", [5, 200, 409])
def test_nan_of_a_weight_reaches_every_loss(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Even if the exponentials of other ranks and segments are far larger."""
    monkeypatch.setattr(launching, "MAX_GROUP_PART_BYTES", 1)
    for spread, P in ((1.0, 4), (40.0, 1)):
        inputs = problem(spread=spread)
        inputs.weight[at] = torch.nan
        counted = inputs.labels != -100
        loss = statistics(inputs, P).loss
        assert loss[counted].isnan().all() and (loss[~counted] == 0).all()


@interpreted
@pytest.mark.parametrize("nats", [5.0, 15.0])
@pytest.mark.parametrize("above", [-30.0, 0.01, 26.4, 60.0])
def test_many_small_terms_beside_a_large_one_count(above: float, nats: float) -> None:
    """0.01 and 26.4 nats lie just above the edge of a bin, where its unit is largest."""
    check_small_terms(above, nats)


@interpreted
def test_what_it_asks_for_is_checked() -> None:
    with pytest.raises(ValueError, match=r"must begin at a multiple of 32 .* got \d+: pad"):
        statistics(problem(), 4, step=1)
    given = torch.randn(3, 4), torch.randn(5, 4), torch.arange(3)
    invariant = partial(linear_cross_entropy, *given, tp_invariant=True)
    (said,) = set(run_ranks(lambda g: complaint(invariant, impl="triton", tp_group=g), 2))
    assert "got 5: pad the weight" in said  # rank 0's own rows begin at 0
    with pytest.raises(NotImplementedError, match="tp_invariant=True needs impl='triton'"):
        invariant(impl="eager")
