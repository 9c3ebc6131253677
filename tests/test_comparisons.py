"""Each comparison that tests share fails on results that are wrong.

T tokens, V vocabulary rows, H hidden size.
"""

import functools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels import exact_sums, merge_stats, rescue
from flce_dist.kernels.filtered import eager as eager_filter
from flce_dist.parallel import peer_memory
from flce_dist.parallel.peer_memory import PeerMemory
from tests import fake_ranks
from tests.filtered_formula import check_filtered, zipf_inputs
from tests.invariant_problem import check_small_terms, differing, problem, statistics
from tests.parallel_problem import UNEVEN, joined, misses, on_threads
from tests.peer_programs import exception, name_of, turns
from tests.problems import Patch, Upstream, check, compare, inputs, interpreted

RESULTS = ["loss", "dhidden", "dweight", "dbias"]


# --- problems.compare


@pytest.mark.parametrize("factor", [0.0, 1.01, -1.0, torch.nan])
@pytest.mark.parametrize("name", RESULTS)
def test_a_scaled_result(name: str, factor: float) -> None:
    actual = check(inputs(), Upstream())
    actual[name] = actual[name] * factor
    with pytest.raises(AssertionError, match=f"^{name}: "):
        compare(actual, inputs(), Upstream())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RESULTS[1:])
def test_a_scaled_gradient_in_half_precision(name: str, dtype: torch.dtype) -> None:
    for factor in (0.0, 1.05):
        actual = check(inputs(dtype), Upstream())
        actual[name] = actual[name] * factor
        with pytest.raises(AssertionError, match=f"^{name}: "):
            compare(actual, inputs(dtype), Upstream())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RESULTS[1:])
def test_one_row_of_a_gradient_that_is_missing(name: str, dtype: torch.dtype) -> None:
    """The largest row alone; a rank's share, a window or a chunk would be more."""
    actual = check(inputs(dtype), Upstream())
    gradient = actual[name].reshape(len(actual[name]), -1)
    gradient[gradient.float().norm(dim=1).argmax()] = 0.0
    with pytest.raises(AssertionError, match=f"^{name}: "):
        compare(actual, inputs(dtype), Upstream())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["loss", "lse", "logprob", "entropy", "correct"])
def test_a_metric_that_is_off_by_a_thousandth(name: str, dtype: torch.dtype) -> None:
    """The loss's budget does not depend on the operands' dtype: statistics are fp32."""
    actual = check(inputs(dtype), Upstream(), with_metrics=True)
    actual[name] = ~actual[name] if name == "correct" else actual[name] * 1.001
    with pytest.raises(AssertionError, match=f"^{name}: "):
        compare(actual, inputs(dtype), Upstream())


# --- parallel_problem: misses, joined


@pytest.mark.parametrize("factor", [0.0, 1.01, 4.0])
@pytest.mark.parametrize("name", RESULTS)
def test_results_of_ranks(name: str, factor: float) -> None:
    outcome = on_threads(4, UNEVEN)
    assert misses(outcome, UNEVEN) == []
    changed: dict[str, Any] = {name: factor * getattr(outcome, name)}
    assert [miss.split(":")[0] for miss in misses(outcome._replace(**changed), UNEVEN)] == [name]


@pytest.mark.parametrize("name", ["loss", "dhidden", "calls"])
def test_ranks_that_differ(name: str) -> None:
    one = on_threads(1, UNEVEN)
    other: Any = ("allreduce",) if name == "calls" else getattr(one, name) * (1 + 2e-7)
    with pytest.raises(AssertionError, match=r"differs|different"):
        joined([one, one._replace(**{name: other})], sequence_parallel=False)


# --- fake_ranks: orders of streams


def arrivals_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peer_memory.Arrival, "wait", lambda self: self._outs.clear())


def memory_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fake_ranks.Rank, "keep", lambda *_: None)


def nobody_told(patch: pytest.MonkeyPatch) -> None:
    pull = PeerMemory.pull

    def wrong(self: Any, copies: Any) -> Any:
        self._tell_ready = []
        return pull(self, copies)

    patch.setattr(PeerMemory, "pull", wrong)


@pytest.mark.parametrize(
    ("plant", "program"),
    [
        (arrivals_not_awaited, turns),
        (memory_not_kept, functools.partial(exception, at=18)),
        (nobody_told, turns),
    ],
    ids=name_of,
)
def test_a_wrong_order_of_streams(plant: Any, program: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(peer_memory, "watch", lambda wait: None)
    plant(monkeypatch)
    if plant is nobody_told:
        ended = fake_ranks.run(2, program, seeds=60)
        assert [type(error) for error in ended] == [fake_ranks.Hung] * 2
        return
    with pytest.raises(fake_ranks.Wrong):
        fake_ranks.run(2, program, seeds=60)


# --- filtered gradients


@pytest.mark.parametrize("name", ["profile", "mass"])
def test_filtered_gradients_without_a_part(mutate: Patch, name: str) -> None:
    def wrong(original: Any, *args: Any) -> Any:
        found = original(*args)
        return found.roll(1) if name == "profile" else (found[0], torch.zeros_like(found[1]))

    given, eps = zipf_inputs(300, 1300, 16, bias=True), 2.0**-7
    check_filtered(given, eps)
    place = {"profile": "tile_profile", "mass": "kept_tiles"}[name]
    mutate(eager_filter, place, wrong)
    with pytest.raises(AssertionError, match=r"error .* exceeds"):
        check_filtered(given, eps)


# --- statistics that must not depend on how columns are cut


@interpreted
def test_units_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    headroom = exact_sums.headroom
    monkeypatch.setattr(exact_sums, "headroom", lambda group_v: headroom(group_v) + 16)
    with pytest.raises(AssertionError, match="not close"):
        check_small_terms(0.01, 15.0)


@triton.jit
def rounded_slice(x, bin, HEADROOM: tl.constexpr):
    return x.to(tl.float32)  # as it is: sums then round


@interpreted
@pytest.mark.usefixtures("one_launch_at_a_time")
def test_sums_that_depend_on_the_order(
    monkeypatch: pytest.MonkeyPatch, merged_sums: list[Tensor]
) -> None:
    for owner in (exact_sums, merge_stats, rescue):
        if hasattr(owner, "slice_in"):
            monkeypatch.setattr(owner, "slice_in", rounded_slice)
    one, many = statistics(problem()), statistics(problem(), 4)
    assert not torch.equal(merged_sums[-1], merged_sums[0])
    assert differing(many, one)
