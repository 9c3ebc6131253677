"""Filtered gradients on several ranks, under torch.compile and into main_grad.

T tokens, V_all vocabulary rows, H hidden size, P ranks.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import filtered, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.core.hidden_gradient import ChunkOfHidden
from flce_dist.kernels.filtered import gpu as gpu_filter
from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import relative_rms, run_ranks
from tests import parallel_problem
from tests.filtered_formula import definition, filtered_gradients, zipf_inputs
from tests.outcomes import Outcome
from tests.parallel_problem import GRADIENTS
from tests.problems import IGNORE, Inputs, Patch, Upstream, both, device_of, run, run_op
from tests.test_main_grad import parameter, step

EPS = 2.0**-9
FILTERED = filtered.schedule(EPS)


def problem_of(V: int = 1536, dtype: torch.dtype = torch.float64) -> Inputs:
    """Ignored tokens hold NaN."""
    problem = zipf_inputs(256, V, 16, dtype, bias=True, token_weight=True)
    problem.hidden[problem.labels == IGNORE] = torch.nan
    return problem


def on_rank(
    group: dist.ProcessGroup, problem: Inputs, ranges: list[tuple[int, int]], **options: Any
) -> tuple[Outcome, list[str]]:
    """Loss, metrics and this rank's gradients; the names of the collectives."""
    rank, (start, end), hidden = group.rank(), ranges[group.rank()], problem.hidden
    if options.get("sequence_parallel"):
        hidden = hidden.tensor_split(group.size())[rank]
    assert problem.bias is not None
    weight, bias = problem.weight[start:end], problem.bias[start:end]
    share = replace(problem, hidden=hidden, weight=weight, bias=bias)
    shares = Outcome()

    def call(**given: Any) -> tuple[Tensor, ...]:
        out: Any = linear_cross_entropy_with_metrics(**given)
        shares.update(kept_share=out.kept_share, rank_one_mass=out.rank_one_mass)
        return out

    options = {"vocab_size": len(problem.weight), "vocab_range": (start, end), **options}
    found = run(call, share, Upstream(), tp_group=group, schedule=FILTERED, **options)
    return found.changed(**shares), list(getattr(group, "calls", ()))


def joined(problem: Inputs, ranges: list[tuple[int, int]], **options: Any) -> Outcome:
    """All ranks' gradients; loss and metrics must be the same bits, and so the collectives."""
    found = run_ranks(lambda group: on_rank(group, problem, ranges, **options), len(ranges))
    assert all(calls == found[0][1] for _, calls in found)
    sp = options.get("sequence_parallel", False)
    return parallel_problem.joined([results for results, _ in found], sequence_parallel=sp)


CUTS: dict[str, list[tuple[int, int]]] = {
    "1 rank": [(0, 1536)],
    "2 ranks": [(0, 768), (768, 1536)],
    "3 ranks": [vocab_range(1536, rank, 3) for rank in range(3)],
    "uneven": [(0, 300), (300, 1200), (1200, 1536)],
    "empty": [(0, 0), (0, 1000), (1000, 1000), (1000, 1536)],
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("vocab_size", [1536, 1300], ids=["whole", "padded"])
@pytest.mark.parametrize("cut", CUTS)
def test_ranks_compute_what_is_defined(cut: str, vocab_size: int, sequence_parallel: bool) -> None:
    """Tiles are counted from each rank's first row, and kept by the probability among all rows."""
    problem, ranges = problem_of(), CUTS[cut]
    problem.labels.clamp_(max=vocab_size - 1)
    if sequence_parallel and 256 % len(ranges):
        ranges = CUTS["2 ranks"]
    starts = sorted({start for start, end in ranges if start < end})
    options: Any = {"vocab_size": vocab_size, "shard_starts": starts}
    truth = definition(problem, EPS, **options)
    actual = joined(problem, ranges, vocab_size=vocab_size, sequence_parallel=sequence_parallel)
    for name in GRADIENTS:
        assert relative_rms(actual[name], getattr(truth, name)) <= 1e-11, name
    assert actual["kept_share"].item() == pytest.approx(truth.kept.double().mean().item())
    assert actual["rank_one_mass"].item() == pytest.approx(truth.rank_one_mass.item())
    assert not actual["dweight"][vocab_size:].any() and not actual["dbias"][vocab_size:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_whole_tiles_on_each_rank_change_only_rounding(dtype: torch.dtype) -> None:
    problem = problem_of(2048, dtype)
    one, *others = (
        joined(problem, [vocab_range(2048, rank, P) for rank in range(P)], sequence_parallel=sp)
        for P, sp in ((1, False), (2, False), (4, False), (2, True), (4, True))
    )
    for other in others:
        assert one["kept_share"] == other["kept_share"]
        for name in GRADIENTS:
            error = relative_rms(other[name], one[name])
            assert error <= 2 * torch.finfo(dtype).eps + 1e-6, (name, error)


@pytest.mark.parametrize("options", [{"reduce_dhidden": False}, {"reduce_in_fp32": True}], ids=str)
@pytest.mark.parametrize(
    ("impl", "dtype", "limit"),
    [("eager", torch.float64, 1e-11), ("triton", torch.float32, 1e-5)],
    ids=["eager", "triton"],
)
@pytest.mark.usefixtures("one_launch_at_a_time")
def test_who_sums_dhidden(
    impl: str, dtype: torch.dtype, limit: float, options: dict[str, Any]
) -> None:
    problem, options = problem_of(dtype=dtype), {"impl": impl, **options}
    found = run_ranks(lambda group: on_rank(group, problem, CUTS["2 ranks"], **options), 2)
    dhidden = [results["dhidden"] for results, _ in found]
    total = dhidden[0] if "reduce_in_fp32" in options else sum(dhidden)
    wanted = filtered_gradients(problem, EPS, shard_starts=[0, 768])
    assert isinstance(total, Tensor) and relative_rms(total, wanted["dhidden"]) <= limit
    dweight = torch.cat([results["dweight"] for results, _ in found])
    assert relative_rms(dweight, wanted["dweight"]) <= limit


@pytest.mark.usefixtures("one_launch_at_a_time")
def test_the_sum_over_ranks_is_in_flight_during_the_last_dweight(mutate: Patch) -> None:
    """After dhidden of the last round, before dweight of it."""
    seen: dict[int, list[str]] = {0: [], 1: []}

    def noting(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        seen[dist.get_rank()].append(name)
        return original(*args, **kwargs)

    for name in ("add_kept_dhidden", "kept_dweight"):
        mutate(gpu_filter, name, partial(noting, name))
    mutate(ChunkOfHidden, "finish", partial(noting, "finish"))

    def step(group: dist.ProcessGroup) -> None:
        hidden, weight = (torch.randn(n, 8, requires_grad=True) for n in (200, 600))
        linear_cross_entropy(
            hidden, weight, torch.arange(200), tp_group=group, schedule=FILTERED, impl="triton",
            max_logits_bytes=1,
        ).backward()  # fmt: skip

    run_ranks(step, 2)
    a_round = ["add_kept_dhidden", "kept_dweight"]
    expected = [*a_round * 2, "add_kept_dhidden", "finish", "kept_dweight"]
    assert seen == {0: expected, 1: expected}


def test_compiled_metrics() -> None:
    problem = zipf_inputs(200, 600, 8)
    call = linear_cross_entropy_with_metrics
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    arguments: Any = (problem.hidden, problem.weight, problem.labels)
    results = [one(*arguments, schedule=FILTERED) for one in (call, compiled)]
    assert all(map(torch.equal, *results))
    problem.hidden.requires_grad_()
    with pytest.raises(
        Exception, match=r"takes schedule=filtered.schedule\(.*\) only without gradients"
    ):
        compiled(*arguments, schedule=FILTERED)


def test_a_schedule_made_in_compiled_code() -> None:
    problem = zipf_inputs(140, 600, 8)

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        schedule = filtered.schedule(0.375)  # of no other test, so it is new to compiled code
        return linear_cross_entropy(hidden, weight, problem.labels, schedule=schedule)

    def step(call: Any) -> list[Tensor]:
        hidden, weight = (x.clone().requires_grad_() for x in (problem.hidden, problem.weight))
        loss = call(hidden, weight)
        return [loss, *torch.autograd.grad(loss, (hidden, weight))]

    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, step(compiled), step(loss_of)))


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16], ids=str)
@both
def test_dweight_is_added_to_main_grad(impl: str, main_dtype: torch.dtype) -> None:
    problem = zipf_inputs(140, 600, 8, torch.bfloat16)
    problem.labels.clamp_(max=549)
    options: dict[str, Any] = {"impl": impl, "schedule": FILTERED, "vocab_size": 550}
    plain = run_op(problem, Upstream(), **options)
    given = problem.to(device_of(impl))
    weight = parameter(given, main_dtype, flag=False, apart=True)
    assert torch.equal(step(given, weight, **options).cpu(), plain["dhidden"])
    assert weight.grad is None
    before, after = weight.before.cpu(), weight.main_grad.cpu()
    wanted = filtered_gradients(problem, EPS, vocab_size=550)["dweight"]
    rounding = torch.finfo(main_dtype).eps * before.float().norm() / wanted.norm()
    assert relative_rms(after.float() - before.float(), wanted) <= 0.005 + float(rounding)
    assert torch.equal(after[550:], before[550:])
