"""Gradients wherever D comes from; gathered hidden may be overwritten, never a caller's."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flce_dist import plan
from flce_dist.kernels.interface import kernels_of
from flce_dist.options import Schedule
from flce_dist.testing import run_ranks
from tests.parallel_problem import Outcome, Problem, joined, misses, share_of
from tests.problems import both, pairwise, plan_sizes

T, H, P = 64, 16, 2
BF16, FP16 = torch.bfloat16, torch.float16
BUDGET = T * 4 * 160  # of 254 columns; windows are of 32

CASES: dict[str, tuple[Schedule, int | None, torch.dtype]] = {
    "recompute": ("recompute", None, torch.float32),
    "recompute bf16": ("recompute", None, BF16),
    "recompute fp16": ("recompute", None, FP16),
    "cached": ("cached", None, torch.float32),
    "cached bf16": ("cached", None, BF16),
    "cached fp16": ("cached", None, FP16),
    "mixed": ("cached", BUDGET, torch.float32),
    "mixed bf16": ("cached", BUDGET // 2, BF16),
    "mixed fp16": ("cached", BUDGET // 2, FP16),
    "in_forward": ("in_forward", None, torch.float32),
    "in_forward lent, chunks": ("in_forward", BUDGET // 4, BF16),
    "in_forward lent, mixed": ("in_forward", BUDGET, torch.float32),
}
"""Schedule, max_logits_bytes and dtype."""

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1, "z_loss_weight": 1e-2, "logit_scale": 0.5},
    "softcap": {"softcap": 5.0, "logit_scale": 0.5},
    "weights": {"token_weight": torch.linspace(-1, 2, T)},
    # Three factors per token, each of which must contain the scale.
    "softcap, smoothing": {"softcap": 5.0, "label_smoothing": 0.1, "logit_scale": 0.5},
}


@pytest.fixture(autouse=True)
def small_windows() -> Iterator[None]:
    with plan_sizes(
        tile=16, min_window=32, max_window=32, most_recomputed=0.4, split_from=16, first_lent=16
    ):
        yield


@pytest.mark.parametrize("case", CASES)
def test_cases_are_what_they_are_called(case: str) -> None:
    schedule, budget, dtype = CASES[case]
    chosen = plan(
        T=T, V=254, itemsize=dtype.itemsize, schedule=schedule, max_logits_bytes=budget,
        converts=dtype == FP16, dweight_row_bytes=(H * dtype.itemsize, 4 * H),
    )  # fmt: skip
    assert (chosen.cached_v == 0) == ("recompute" in case)
    assert (0 < chosen.cached_v < 254) == ("mixed" in case)
    assert (len(chosen.chunks()) > 1) == ("chunks" in case)
    assert bool(getattr(chosen, "lending", ())) == ("lent" in case)


def problem_of(case: str, options: str, ranks: int) -> tuple[Problem, dict[str, Any]]:
    """Return the problem, whose ignored tokens hold NaN and infinities, and its options."""
    schedule, budget, dtype = CASES[case]
    problem = Problem(T=T, H=H, V_all=254 * ranks - 1, dtype=dtype, options=OPTIONS[options])
    hidden, _, _, labels = problem.tensors
    anything = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], dtype=dtype)
    hidden[labels == -100] = anything.repeat(H // 4)
    return problem, {"schedule": schedule, "max_logits_bytes": budget}


def step(group: Any, problem: Problem, *, sequence_parallel: bool, **how: Any) -> Outcome:
    """What a rank computes: twice, the same bits; operands keep theirs."""
    share = share_of(group, problem, sequence_parallel=sequence_parallel)
    given, leaves = [x.clone() for x in share[:3]], share.leaves()
    loss = share.loss(group, problem, sequence_parallel=sequence_parallel, **how)
    upstream = problem.upstream.to(loss.dtype)
    first = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, upstream)
    for one, other in (*zip(first, second, strict=True), *zip(leaves, given, strict=True)):
        assert torch.equal(one.detach().view(torch.uint8), other.view(torch.uint8))

    return Outcome(loss.detach(), *first)


def check_case(case: str, options: str, sequence_parallel: bool, ranks: int, **how: Any) -> None:
    problem, more = problem_of(case, options, ranks)
    how = {"sequence_parallel": sequence_parallel, **more, **how}
    # Forked for Triton: the interpreter is not for threads.
    backend: Any = "gloo" if "impl" in how else "threads"
    outcomes = run_ranks(lambda group: step(group, problem, **how), ranks, backend=backend)
    assert misses(joined(outcomes, sequence_parallel=sequence_parallel), problem) == []


@pytest.mark.parametrize(
    ("case", "options", "sequence_parallel", "ranks"),
    pairwise(
        given
        for given in itertools.product(CASES, OPTIONS, (False, True), (1, 2))
        if given[1] != "softcap, smoothing" or given[0].startswith("recompute")
    ),
)
def test_gradients(case: str, options: str, sequence_parallel: bool, ranks: int) -> None:
    check_case(case, options, sequence_parallel, ranks)


@pytest.mark.parametrize(
    "case", ["recompute", "recompute bf16", "cached", "mixed", *(x for x in CASES if "lent" in x)]
)
def test_gradients_by_triton(case: str) -> None:
    check_case(case, "smoothing", sequence_parallel=True, ranks=2, impl="triton")


@both
def test_rows_in_place(impl: str) -> None:
    """Only the given rows and columns of a larger matrix are written."""
    kernels, labels = kernels_of(impl), torch.tensor([3, -100, 0, -100, 7])
    whole = torch.randn(7, 10)
    whole[2, 4], whole[4, 3] = torch.nan, torch.inf
    expected = whole.clone()
    expected[[2, 4], 2:9] = 0.0
    part = whole[1:6, 2:9]
    kernels.scale_rows(part, None, labels, ignore_index=-100, out=part)
    assert torch.equal(whole, expected)

    x, scale = whole[1:6, 2:9], torch.tensor([2.0, torch.nan, -1.0, 0.0, 0.5])
    expected[1:6, 2:9] *= scale.where(labels != -100, 0.0)[:, None]
    kernels.scale_rows(x, scale, labels, ignore_index=-100, out=x)
    assert torch.equal(whole, expected)
