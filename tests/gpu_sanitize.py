"""Run every kernel on small odd shapes, to be watched by a sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python -m tests.gpu_sanitize --cases 6

Without the caching allocator each tensor is an allocation of its own, so that a step beyond one is
seen. Each result is also held against ``flce_dist.reference`` in fp64. Prints "ok" at the end; a
wrong result raises. Without a GPU it runs eager, or the interpreted kernels by --impl triton.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flce_dist import filtered, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.options import Schedule
from flce_dist.reference import reference_linear_cross_entropy
from flce_dist.testing import error_budget
from tests.filtered_formula import definition, filtered_gradients
from tests.problems import Inputs

V = 507
IGNORE = -100
METRICS = ("lse", "logprob", "entropy")


@dataclass(frozen=True)
class Case:
    """One call. ``pointers`` gives weight a stride that tensor descriptors refuse."""

    T: int
    H: int
    dtype: torch.dtype
    schedule: Schedule
    pointers: bool = False
    bias: bool = False
    metrics: bool = False
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
    Case(130, 64, BF16, "recompute", pointers=True, options=(SOFTCAP, SMOOTH, BUDGET)),
    Case(300, 64, FP32, "in_forward", options=(BUDGET,)),
    Case(3, 123, FP16, "cached", metrics=True, options=(SOFTCAP,)),
    Case(130, 64, BF16, "cached", metrics=True, bias=True, padding=5, options=(SMOOTH,)),
    Case(1, 64, FP16, "recompute", options=(SOFTCAP, ("logit_scale", 0.5))),
    Case(130, 123, FP32, "recompute", bias=True, metrics=True, options=(SMOOTH, SOFTCAP)),
    Case(130, 123, FP16, "in_forward", bias=True, options=(SMOOTH, Z_LOSS)),
]


def make(case: Case, device: str) -> dict[str, Tensor]:
    """Operands and labels; with more than one token one row overflows and one, NaN, is ignored."""
    g = torch.Generator().manual_seed(case.T + case.H)
    rows = V + case.padding
    hidden = torch.randn(case.T, case.H, generator=g)
    weight = torch.randn(rows, case.H, generator=g) * (1.5 / case.H**0.5)
    bias = torch.randn(rows, generator=g)
    labels = torch.randint(V, (case.T,), generator=g)
    labels[-1] = V - 1
    if case.T > 1:
        hidden[0] = -70 * weight[labels[0]]  # a label logit near -150: others are rescued
        labels[1] = IGNORE
        hidden[1] = torch.nan
    weight[V:] = torch.nan
    tensors = {"hidden": hidden, "weight": weight, **({"bias": bias} if case.bias else {})}
    tensors = {name: x.to(device, case.dtype) for name, x in tensors.items()}
    if case.pointers:
        wide = torch.nn.functional.pad(tensors["weight"], (0, 1))
        tensors["weight"] = wide[:, :-1]
    return {**tensors, "labels": labels.to(device)}


def outcome(call: Any, tensors: dict[str, Tensor], case: Case, **options: Any) -> dict[str, Tensor]:
    """Results and gradients by name; every metric gets an upstream gradient of its own."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if name != "labels"}
    out = call(
        labels=tensors["labels"], vocab_size=V, reduction="sum", **leaves, **dict(case.options),
        **options,
    )  # fmt: skip
    out = dict(zip(("loss", *METRICS), (out,) if isinstance(out, Tensor) else out, strict=False))
    names = out if case.metrics else ["loss"]
    total = sum((i + 1) * out[name].sum() for i, name in enumerate(names))
    assert isinstance(total, Tensor)
    total.backward()
    gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {name: out[name].detach() for name in names} | gradients


def reference(tensors: dict[str, Tensor], case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """The textbook, which multiplies padding rows by 0 and so gets clean ones."""
    tensors = {
        name: x.to(dtype) if x.is_floating_point() else x.clone() for name, x in tensors.items()
    }
    tensors["weight"] = tensors["weight"].clone()
    tensors["weight"][V:] = 0.0
    kept = {k: v for k, v in case.options if k != "max_logits_bytes"}
    case = Case(**{**vars(case), "options": tuple(kept.items())})
    return outcome(reference_linear_cross_entropy, tensors, case)


def filtered_truth(
    tensors: dict[str, Tensor], case: Case, truth: dict[str, Tensor]
) -> dict[str, Tensor]:
    """``truth`` with the filtered gradients; some tiles must not be kept."""
    inputs, options = Inputs(**{name: x.cpu() for name, x in tensors.items()}), dict(case.options)
    kept = definition(inputs, EPS, vocab_size=V).kept
    assert kept.any() and not kept.all(), f"{case}: nothing to filter, or everything"
    gradients = filtered_gradients(inputs, EPS, vocab_size=V, reduction="sum", **options)
    return {name: gradients.get(name, x).to(x) for name, x in truth.items()}


def check(case: Case, device: str, impl: str | None) -> None:
    """Run one case; raise AssertionError if a result is beyond its budget."""
    tensors = make(case, device)
    call: Any = linear_cross_entropy_with_metrics if case.metrics else linear_cross_entropy
    actual = outcome(call, tensors, case, schedule=case.schedule, impl=impl)
    truth = reference(tensors, case, torch.float64)
    eager = reference(tensors, case, case.dtype)
    if case.schedule == filtered.schedule(EPS):
        exact, truth = truth, filtered_truth(tensors, case, truth)
        eager = {name: truth[name] + (x.double() - exact[name]) for name, x in eager.items()}
    for name, result in actual.items():
        budget = error_budget(result, truth[name], eager[name], dtype=case.dtype)
        assert budget.met, f"{case}: {name}: {budget}"


def options() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "--cases", {"type": int, "default": len(CASES), "help": "only the first so many"}
    yield "--device", {"default": "cuda" if torch.cuda.is_available() else "cpu"}
    yield "--impl", {"default": None, "help": "triton or eager; by default by device"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_sanitize")
    for name, kwargs in options():
        parser.add_argument(name, **kwargs)
    arguments = parser.parse_args()
    cases = CASES[: arguments.cases]
    assert cases, f"--cases must be at least 1, got {arguments.cases}"
    for case in cases:
        check(case, arguments.device, arguments.impl)
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    print(f"{len(cases)} cases within their budgets")
    print("ok")


if __name__ == "__main__":
    main()
