"""Run every kernel on small odd shapes, to be watched by a sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python -m tests.gpu_sanitize --cases 6

Without the caching allocator each tensor is an allocation of its own, so that a step beyond one is
seen. Each result is also held against ``flce_dist.reference`` in fp64. Prints "ok" at the end; a
wrong result raises. Without a GPU it runs eager, or the interpreted kernels by --impl triton.
"""

import argparse
from functools import partial
from typing import Any

import torch

from flce_dist import linear_sample
from tests import best_problem, divergence_problem, score_problem
from tests.filtered_formula import check_filtered, definition, zipf_inputs
from tests.problems import device_of
from tests.random_cases import Drawn, check_on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMOOTH = ("label_smoothing", 0.1)
Z_LOSS = ("z_loss_weight", 1e-3)
SOFTCAP = ("softcap", 15.0)
BUDGET = ("max_logits_bytes", 1)  # the smallest pieces: 256 columns or tokens
RECOMPUTE, CACHED, IN_FORWARD = (("schedule", x) for x in ("recompute", "cached", "in_forward"))

# Of H = 123, whose rows tensor descriptors refuse, a call reads by pointers.
case = partial(Drawn, batch=1, V_all=507, reduction="sum", bias=False, flagged=True)
some, few, one = (partial(case, tokens=n) for n in (130, 3, 1))
learns = {"metric_gradients": True}

# By what they add to those before: the first few take both paths and all schedules.
CASES = [
    some(H=64, dtype=BF16, how=(CACHED,), bias=True, options=(SMOOTH, Z_LOSS)),
    some(H=123, dtype=BF16, how=(RECOMPUTE,), **learns),
    few(H=64, dtype=BF16, how=(IN_FORWARD,), padding=5),
    some(H=64, dtype=FP16, how=(BUDGET,)),
    one(H=123, dtype=FP32, how=(CACHED,), bias=True),
    some(H=123, dtype=BF16, how=(RECOMPUTE, BUDGET), options=(SOFTCAP, SMOOTH)),
    some(H=64, dtype=FP32, tokens=300, how=(IN_FORWARD, BUDGET)),
    few(H=123, dtype=FP16, how=(CACHED,), options=(SOFTCAP,), **learns),
    some(H=64, dtype=BF16, how=(CACHED,), bias=True, padding=5, options=(SMOOTH,), **learns),
    one(H=64, dtype=FP16, how=(RECOMPUTE,), options=(SOFTCAP, ("logit_scale", 0.5))),
    some(H=123, dtype=FP32, how=(RECOMPUTE,), bias=True, options=(SMOOTH, SOFTCAP), **learns),
    some(H=123, dtype=FP16, how=(IN_FORWARD,), bias=True, options=(SMOOTH, Z_LOSS)),
    some(H=64, dtype=BF16, how=(CACHED,), temperature=None, options=(SOFTCAP,), **learns),
    some(H=64, dtype=BF16, how=(BUDGET, ("skip_ignored", True)), bias=True, options=(SMOOTH,)),
]


def filtered_case(impl: str, eps: float = 0.3) -> None:
    inputs = zipf_inputs(129, 512, 64, BF16, bias=True)
    inputs.labels.clamp_(max=506)
    kept = definition(inputs, eps, vocab_size=507).kept
    assert kept.any() and not kept.all(), "nothing to filter, or everything"
    check_filtered(inputs, eps, impl=impl, vocab_size=507, label_smoothing=0.1)


def best_case(impl: Any) -> None:
    """Of one id, of more than a block has, and a draw of each token."""
    for k in (1, 40):
        asked = best_problem.problem(BF16, k)
        best_problem.compare(best_problem.best(asked, impl), asked)
    there = asked.moved(device_of(impl))
    drawn = linear_sample(there.hidden, there.weight, 3, bias=there.bias, impl=impl)
    assert (drawn.ids >= 0).sum() == best_problem.T - len(best_problem.IGNORED)


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
    for drawn in cases:
        check_on_ranks(drawn, impl, arguments.device)
    if len(cases) > 4:
        filtered_case(impl)
    scored = score_problem.problem(BF16, over="ids", temperature=0.7, softcap=15.0)
    score_problem.check(scored, impl)
    best_case(impl)
    for kind in divergence_problem.KINDS:
        pair = divergence_problem.problem(BF16, kind=kind, softcap=15.0, max_logits_bytes=1)
        divergence_problem.check(pair, impl, with_metrics=True)
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    print(f"{len(cases)} cases within their budgets")
    print("ok")


if __name__ == "__main__":
    main()
