"""Gradients wherever D comes from, and the buffer of dweight's right factor.

It may overwrite gathered hidden states, but never a caller's.

T tokens, V_all vocabulary rows, H hidden size, P ranks.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy
from flce_dist.kernels.interface import kernels_of
from flce_dist.kernels.token_gradient_formulas import RowGradient
from flce_dist.op import gradients
from flce_dist.testing import run_ranks
from tests.parallel_problem import Outcome, Problem, joined, misses, share_of
from tests.problems import both, pairwise, plan_sizes

T, H, P = 64, 16, 2
BF16, FP16 = torch.bfloat16, torch.float16
BUDGET = T * 4 * 160  # of 254 columns; windows are of 32

CASES: dict[str, tuple[dict[str, Any], torch.dtype, set[str]]] = {
    "recompute": ({"schedule": "recompute"}, torch.float32, {"recomputed"}),
    "recompute bf16": ({"schedule": "recompute"}, BF16, {"recomputed"}),
    "recompute fp16": ({"schedule": "recompute"}, FP16, {"recomputed"}),
    "cached": ({"schedule": "cached"}, torch.float32, {"kept"}),
    "cached bf16": ({"schedule": "cached"}, BF16, {"kept"}),
    "cached fp16": ({"schedule": "cached"}, FP16, {"converted"}),
    "mixed": (
        {"schedule": "cached", "max_logits_bytes": BUDGET}, torch.float32, {"kept", "recomputed"},
    ),
    "mixed bf16": (
        {"schedule": "cached", "max_logits_bytes": BUDGET // 2}, BF16, {"kept", "recomputed"},
    ),
    "mixed fp16": (
        {"schedule": "cached", "max_logits_bytes": BUDGET // 2}, FP16, {"converted", "recomputed"},
    ),
    "in_forward": ({"schedule": "in_forward"}, torch.float32, {"kept"}),
    "in_forward chunks": (
        {"schedule": "in_forward", "max_logits_bytes": BUDGET // 4}, BF16, {"kept"},
    ),
    "in_forward lent": (
        {"schedule": "in_forward", "max_logits_bytes": BUDGET}, torch.float32,
        {"kept", "recomputed"},
    ),
}  # fmt: skip
"""Options, dtype, and where D comes from."""
COPIES = {"recompute fp16", "mixed", "mixed bf16", "mixed fp16", "in_forward lent"}
"""Cases in which columns are recomputed from hidden after it was scaled for dweight."""

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


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Where D came from, and "copy" if the right factor of dweight got a buffer of its own."""
    seen: set[str] = set()
    dweight_factor, dlogits = gradients.dweight_factor, gradients.dlogits

    def noting_memory(call: Any, chunk: Any, *args: Any) -> Any:
        factor, row = dweight_factor(call, chunk, *args)
        if factor is not chunk.logits.hidden:
            seen.add("copy")
        return factor, row

    def noting_origin(call: Any, chunk: Any, rows: RowGradient, windows: Any) -> Any:
        cached = "converted" if call.rescales_cache else "kept"
        seen.update("recomputed" if window.cached is None else cached for window in windows)
        return dlogits(call, chunk, rows, windows)

    monkeypatch.setattr(gradients, "dweight_factor", noting_memory)
    monkeypatch.setattr(gradients, "dlogits", noting_origin)
    return seen


def problem_of(case: str, options: str, ranks: int) -> tuple[Problem, dict[str, Any]]:
    """Return the problem, whose ignored tokens hold NaN and infinities, and its options."""
    how, dtype, _ = CASES[case]
    problem = Problem(T=T, H=H, V_all=254 * ranks - 1, dtype=dtype, options=OPTIONS[options])
    hidden, _, _, labels = problem.tensors
    anything = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], dtype=dtype)
    hidden[labels == -100] = anything.repeat(H // 4)
    return problem, how


def step(group: Any, problem: Problem, *, sequence_parallel: bool, **how: Any) -> Outcome:
    """What a rank computes; a second backward must give the same bits, and operands keep theirs."""
    share = share_of(group, problem, sequence_parallel=sequence_parallel)
    given = share[:3]
    leaves = [x.clone().requires_grad_() for x in given]
    hidden, weight, bias = leaves
    loss = linear_cross_entropy(
        hidden, weight, share.labels, bias=bias, vocab_size=problem.V_all,
        vocab_range=share.vocab_range, tp_group=group, sequence_parallel=sequence_parallel,
        **problem.options, **how,
    )  # fmt: skip
    upstream = problem.upstream.to(loss.dtype)
    first = dhidden, dweight, dbias = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, upstream)
    for one, other in (*zip(first, second, strict=True), *zip(leaves, given, strict=True)):
        assert torch.equal(one.detach().view(torch.uint8), other.view(torch.uint8))
    return Outcome(loss.detach(), dhidden, dweight, dbias)


@pytest.mark.parametrize(
    ("case", "options", "sequence_parallel", "ranks"),
    pairwise(
        (case, options, sequence_parallel, ranks)
        for case in CASES
        for options in OPTIONS
        for sequence_parallel in (False, True)
        for ranks in (1, 2)
        if options != "softcap, smoothing" or case.startswith("recompute")
    ),
)
def test_gradients(
    sources: set[str], case: str, options: str, sequence_parallel: bool, ranks: int
) -> None:
    problem, how = problem_of(case, options, ranks)
    how = {"sequence_parallel": sequence_parallel, **how}
    outcomes = run_ranks(lambda group: step(group, problem, **how), ranks)
    assert misses(joined(outcomes, sequence_parallel=sequence_parallel), problem) == []
    assert sources - {"copy"} == CASES[case][2]
    gathered = sequence_parallel and ranks > 1
    assert ("copy" in sources) == (not gathered or case in COPIES)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", ["recompute", "recompute bf16", "cached", "mixed"])
def test_gradients_by_triton(case: str, ranks: int) -> None:
    problem, how = problem_of(case, "smoothing", ranks)
    how = {"sequence_parallel": True, "impl": "triton", **how}
    # Forked: the interpreter is not for threads.
    outcomes = run_ranks(lambda group: step(group, problem, **how), ranks, backend="gloo")
    assert misses(joined(outcomes, sequence_parallel=True), problem) == []


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
