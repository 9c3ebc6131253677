"""Each comparison that tests share fails on results that are wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist import BestIds
from flce_dist.kernels.filtered import eager as eager_filter
from flce_dist.kernels.logits import exact_sums, merge_stats, rescue
from flce_dist.parallel.peers import memory as peer_memory
from flce_dist.parallel.peers.memory import PeerMemory
from tests import (
    best_problem,
    divergence_problem,
    filtered_formula,
    score_problem,
    test_data_parallel,
)
from tests.fake_ranks import Hung, Wrong, run
from tests.filtered_formula import check_filtered, zipf_inputs
from tests.garbage import tensors_in_cycles
from tests.invariant_problem import check_small_terms, differing, problem, statistics
from tests.outcomes import Outcome
from tests.parallel_problem import UNEVEN, joined, misses, on_threads
from tests.peer_programs import gather, gather_beside, turns
from tests.problems import METRICS, Patch, Upstream, check, compare, each_dtype, inputs, interpreted

GRADIENTS = ["dhidden", "dweight", "dbias"]
RESULTS = ["loss", *GRADIENTS]


def wrong(x: Any) -> Any:
    """Numbers 5 percent off; flags, ids and ranks that are others."""
    if x.dtype == torch.bool:
        return ~x
    return 1.05 * x if x.is_floating_point() else x + 1


@each_dtype
@pytest.mark.parametrize("name", [*RESULTS, *METRICS, "correct"])
def test_a_wrong_result_of_the_loss(name: str, dtype: torch.dtype) -> None:
    """Loss and metrics are fp32, whatever the operands are."""
    right = check(inputs(dtype), Upstream(), with_metrics=True)
    factor = 1.001
    if name in RESULTS[1:]:
        factor = 1.01 if dtype == torch.float32 else 1.05
    x = right[name]
    for changed in [~x] if name == "correct" else [0.0 * x, factor * x]:
        with pytest.raises(AssertionError, match=f"^{name}: "):
            compare(right.changed(**{name: changed}), inputs(dtype), Upstream(), with_metrics=True)
    with pytest.raises(AssertionError, match=f"^{name}: missing"):
        compare(right.without(name), inputs(dtype), Upstream(), with_metrics=True)


def test_a_result_that_was_not_asked_for() -> None:
    right = check(inputs(), Upstream(), with_metrics=True)
    with pytest.raises(AssertionError, match=r"^correct: not asked for"):
        compare(right, inputs(), Upstream())


@pytest.mark.parametrize("name", [*score_problem.SCORES, *GRADIENTS])
def test_wrong_scores(name: str) -> None:
    given = score_problem.problem(torch.bfloat16)
    right = score_problem.check(given, "eager")
    with pytest.raises(AssertionError, match=f"^{name}: "):
        score_problem.compare(right.changed(**{name: wrong(right[name])}), given)
    with pytest.raises(AssertionError, match=f"{name}: missing"):
        score_problem.compare(right.without(name), given)


@pytest.mark.parametrize("name", [*RESULTS, *divergence_problem.METRICS])
def test_wrong_divergences(name: str) -> None:
    given = divergence_problem.problem(torch.bfloat16)
    right = divergence_problem.check(given, with_metrics=True)
    with pytest.raises(AssertionError, match=f"^{name}: error"):
        changed = right.changed(**{name: wrong(right[name])})
        divergence_problem.compare(changed, given, with_metrics=True)
    with pytest.raises(AssertionError, match=f"^{name}: missing"):
        divergence_problem.compare(right.without(name), given, with_metrics=True)


@pytest.mark.parametrize("name", BestIds._fields)
@pytest.mark.parametrize("is_exact", [True, False])
def test_wrong_best_ids(name: str, is_exact: bool) -> None:
    asked = best_problem.problem() if is_exact else best_problem.real_problem()
    right = best_problem.best(asked)
    compare_best = best_problem.compare
    if not is_exact:
        compare_best = partial(best_problem.compare_real, nats=1e-4)
    compare_best(right, asked)
    for x in (wrong(getattr(right, name)), None):
        changes: dict[str, Any] = {name: x}
        with pytest.raises((AssertionError, TypeError)):
            compare_best(right._replace(**changes), asked)


@pytest.mark.parametrize("name", BestIds._fields)
def test_best_ids_in_other_bits(name: str) -> None:
    right = best_problem.best(best_problem.problem())
    changes: dict[str, Any] = {name: wrong(getattr(right, name))}
    assert best_problem.same_bits(right, right)
    assert not best_problem.same_bits(right._replace(**changes), right)


@pytest.mark.parametrize("name", RESULTS)
def test_wrong_results_of_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given = test_data_parallel.whole()
    options: dict[str, Any] = {"schedule": "recompute", "reduction": "mean"}
    test_data_parallel.check(given, **options)
    changes: dict[str, Callable[[Outcome], Outcome]] = {
        "error": lambda right: right.changed(**{name: wrong(right[name])}),
        "missing": lambda right: right.without(name),
    }
    right = test_data_parallel.step

    def step(change: Callable[[Outcome], Outcome], *args: Any, **kwargs: Any) -> Outcome:
        return change(right(*args, **kwargs))

    for message, change in changes.items():
        monkeypatch.setattr(test_data_parallel, "step", partial(step, change))
        with pytest.raises(AssertionError, match=rf"'{name}: {message}"):
            test_data_parallel.check(given, **options)


@pytest.mark.parametrize("name", RESULTS)
def test_wrong_results_of_ranks(name: str) -> None:
    outcome = on_threads(4, UNEVEN)
    assert misses(outcome, UNEVEN) == []
    changed: dict[str, Any] = {name: 1.01 * getattr(outcome, name)}
    assert [miss.split(":")[0] for miss in misses(outcome.changed(**changed), UNEVEN)] == [name]
    assert misses(outcome.without(name), UNEVEN) == [f"{name}: missing"]


@pytest.mark.parametrize("name", ["loss", "dhidden", "calls"])
def test_ranks_that_differ(name: str) -> None:
    one = on_threads(1, UNEVEN)
    other: Any = ("allreduce",) if name == "calls" else getattr(one, name) * (1 + 2e-7)
    with pytest.raises(AssertionError, match=r"differs|different"):
        joined([one, one.changed(**{name: other})], sequence_parallel=False)
    for ranks in ([one, one.without(name)], [one.without(name), one]):
        with pytest.raises(AssertionError, match="differ between ranks"):
            joined(ranks, sequence_parallel=False)


@pytest.mark.parametrize(("owner", "name", "wrong", "ends"), [
    (peer_memory.Arrival, "wait", lambda self: self._held.clear(), Wrong),
    (PeerMemory, "_tell_ready", property(lambda _: [], lambda *_: None), Hung),
    (PeerMemory, "_order", lambda *_: None, Wrong),
], ids=["arrivals not awaited", "nobody told", "streams that do not wait"])  # fmt: skip
def test_a_wrong_order_of_streams(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Any, ends: Any
) -> None:
    monkeypatch.setattr(peer_memory, "watch", lambda wait: None)
    monkeypatch.setattr(owner, name, wrong, raising=False)
    program = partial(turns, uses=(gather, gather_beside, gather))
    with pytest.raises(ends):
        for error in run(2, program, seeds=60):
            raise error or AssertionError("a rank ended")


def test_tensors_that_a_call_leaves_in_a_cycle() -> None:
    def call() -> None:
        held: list[Any] = [torch.zeros(3, 5), torch.zeros(7).expand(2, 7)]
        held.append(held)

    assert sorted(tensors_in_cycles(call)) == [(2, 7), (3, 5)]
    assert tensors_in_cycles(lambda: torch.zeros(3, 5)) == []


def test_filtered_gradients_with_wrong_profiles(mutate: Patch) -> None:
    mutate(eager_filter, "tile_profile", lambda original, *args: original(*args).roll(1))
    with pytest.raises(AssertionError, match=r"error .* exceeds"):
        check_filtered(zipf_inputs(300, 1300, 16, bias=True), 2.0**-7)


@pytest.mark.parametrize("name", RESULTS)
def test_wrong_filtered_gradients(mutate: Patch, name: str) -> None:
    def off(call: Any, *args: Any, **kwargs: Any) -> Outcome:
        right = call(*args, **kwargs)
        return right.changed(**{name: wrong(right[name])})

    mutate(filtered_formula, "run_op", off)
    with pytest.raises(AssertionError):
        check_filtered(zipf_inputs(300, 1300, 16, bias=True), 2.0**-7)


@interpreted
def test_units_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of tp_invariant, which must not depend on how columns are cut, then lose small terms."""
    headroom = exact_sums.headroom
    monkeypatch.setattr(exact_sums, "headroom", lambda *args: headroom(*args) + 16)
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
