"""Run every kernel on small odd shapes, to be watched by a sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python -m tests.gpu_sanitize --cases 6

Without the caching allocator each tensor is an allocation of its own, so that a step beyond one is
seen. Each result is also held against ``flce_dist.reference`` in fp64. Prints "ok" at the end; a
wrong result raises. Without a GPU it runs eager, or the interpreted kernels by --impl triton.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from flce_dist import filtered
from flce_dist.options import ExtraSchedule, Schedule
from tests import score_problem
from tests.filtered_formula import check_filtered, definition
from tests.problems import IGNORE, METRICS, Inputs, Upstream, check, make_inputs

V = 507


@dataclass(frozen=True)
class Case:
    """One call. Of H = 123, whose rows tensor descriptors refuse, it reads by pointers."""

    T: int
    H: int
    dtype: torch.dtype
    schedule: Schedule | ExtraSchedule
    bias: bool = False
    metrics: bool = False
    tempered: bool = False
    padding: int = 0
    options: tuple[tuple[str, Any], ...] = ()


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMOOTH = ("label_smoothing", 0.1)
Z_LOSS = ("z_loss_weight", 1e-3)
SOFTCAP = ("softcap", 15.0)
EPS = 0.3
BUDGET = ("max_logits_bytes", 1)  # the smallest pieces: 256 columns or tokens

# By what they add to those before: the first few take both paths, all schedules and the filter.
CASES = [
    Case(130, 64, BF16, "cached", bias=True, options=(SMOOTH, Z_LOSS)),
    Case(130, 123, BF16, "recompute", metrics=True),
    Case(3, 64, BF16, "in_forward", padding=5),
    Case(130, 64, FP16, "auto", options=(BUDGET,)),
    Case(129, 64, BF16, filtered.schedule(EPS), bias=True, padding=5, options=(SMOOTH,)),
    Case(1, 123, FP32, "cached", bias=True),
    Case(130, 123, BF16, "recompute", options=(SOFTCAP, SMOOTH, BUDGET)),
    Case(300, 64, FP32, "in_forward", options=(BUDGET,)),
    Case(3, 123, FP16, "cached", metrics=True, options=(SOFTCAP,)),
    Case(130, 64, BF16, "cached", metrics=True, bias=True, padding=5, options=(SMOOTH,)),
    Case(1, 64, FP16, "recompute", options=(SOFTCAP, ("logit_scale", 0.5))),
    Case(130, 123, FP32, "recompute", bias=True, metrics=True, options=(SMOOTH, SOFTCAP)),
    Case(130, 123, FP16, "in_forward", bias=True, options=(SMOOTH, Z_LOSS)),
    Case(130, 64, BF16, "cached", metrics=True, tempered=True, options=(SOFTCAP,)),
    Case(130, 64, BF16, "recompute", bias=True, options=(SMOOTH, BUDGET, ("skip_ignored", True))),
]


def make(case: Case) -> Inputs:
    """With more than one token one row overflows and one, NaN, is ignored."""
    inputs = make_inputs(
        case.T, V + case.padding, case.H, case.dtype, spread=1.5, bias=case.bias,
        temperature=case.tempered, ignored=0.0,
    )  # fmt: skip
    inputs.labels.remainder_(V)[-1] = V - 1
    if case.T > 1:
        # A label logit near -150: others are rescued.
        inputs.hidden[0] = -70 * inputs.weight[inputs.labels[0]]
        inputs.labels[1] = IGNORE
        inputs.hidden[1] = torch.nan
    inputs.weight[V:] = torch.nan
    return inputs


def run(case: Case, impl: str) -> None:
    """Run one case; raise AssertionError if a result is beyond its budget."""
    inputs = make(case)
    options: dict[str, Any] = {"vocab_size": V, "reduction": "sum", **dict(case.options)}
    if case.schedule == filtered.schedule(EPS):
        kept = definition(inputs, EPS, vocab_size=V).kept
        assert kept.any() and not kept.all(), "nothing to filter, or everything"
        check_filtered(inputs, EPS, impl=impl, **options)
        return
    # Every metric gets an upstream gradient of its own.
    metrics = {name: torch.full((case.T,), 2.0 + i) for i, name in enumerate(METRICS)}
    upstream = Upstream(1.0, metrics if case.metrics else None)
    check(inputs, upstream, impl=impl, schedule=case.schedule, **options)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_sanitize")
    add = parser.add_argument
    add("--cases", type=int, default=len(CASES), help="only the first so many")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--impl", help="triton or eager; by default by device")
    arguments = parser.parse_args()
    impl = arguments.impl or ("triton" if arguments.device == "cuda" else "eager")
    cases = CASES[: arguments.cases]
    assert cases, f"--cases must be at least 1, got {arguments.cases}"
    for case in cases:
        run(case, impl)
    scored = score_problem.problem(BF16, over="ids", temperature=0.7, softcap=15.0)
    score_problem.check(scored, impl)
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    print(f"{len(cases)} cases within their budgets")
    print("ok")


if __name__ == "__main__":
    main()
