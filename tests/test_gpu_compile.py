"""PyTorch's examiner of operators, and which calls compile kernels."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import triton
from torch.library import opcheck

from flce_dist import filtered, linear_cross_entropy
from flce_dist.options import LossOptions
from tests.problems import DTYPES, pairwise
from tests.test_gpu_oracle import CUDA, inputs_on

V, H = 1000, 64


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


FILTERED = filtered.schedule(2.0**-12)
EXAMINED_ON_GPU = [
    ("recompute", "mean", True, torch.bfloat16),
    ("cached", "none", False, torch.bfloat16),
    ("cached", "mean", True, torch.float16),
    ("in_forward", "sum", False, torch.float32),
    (FILTERED, "mean", False, torch.bfloat16),
]
EXAMINED = pairwise(
    (*how, dtype)
    for how in (
        *((schedule, "mean", False) for schedule in ("in_forward", FILTERED)),
        *itertools.product(["auto", "recompute", "cached"], ["mean", "none"], [False, True]),
    )
    for dtype in DTYPES
)


@pytest.mark.parametrize(
    ("device", "schedule", "reduction", "with_metrics", "dtype"),
    [
        *(("cpu", *case) for case in EXAMINED),
        *(pytest.param("cuda", *case, marks=CUDA.marks) for case in EXAMINED_ON_GPU),
    ],
    ids=str,
)
def test_opcheck(device, schedule, reduction, with_metrics, dtype):
    """Schema, fake, autograd registration and dynamic shapes, by PyTorch's own examiner."""
    inputs = inputs_on(device, 66, V, H, dtype, bias=True, ignored=0.0)
    operands = (inputs.hidden.view(2, 33, H), inputs.weight, inputs.bias)
    hidden, weight, bias = (x.requires_grad_() for x in operands if x is not None)
    options = LossOptions(
        reduction, label_smoothing=0.1, z_loss_weight=0.01, logit_scale=0.5,
        schedule=schedule, with_metrics=with_metrics,
    )  # fmt: skip
    spec = (*dataclasses.astuple(options), None, [True] * 3)
    arguments = (hidden, weight, inputs.labels.view(2, 33), bias, None, *spec)
    opcheck(torch.ops.flce_dist.forward.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["recompute", "cached", "in_forward", FILTERED])
def test_a_new_number_of_tokens_compiles_no_kernel(schedule: Any) -> None:
    compiled: list[str] = []

    def step(T: int) -> None:
        g = torch.Generator("cuda").manual_seed(T)
        hidden, weight = (
            torch.randn(n, H, generator=g, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for n in (T, V)
        )
        labels = torch.randint(V, (T,), generator=g, device="cuda")
        linear_cross_entropy(hidden, weight, labels, schedule=schedule).backward()

    step(1216)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = lambda **seen: compiled.append(seen["repr"])
        for T in (1217, 1232, 1279):
            step(T)
    assert not compiled
