"""torch.compile of a small model around the op, and PyTorch's examiner of operators, on a GPU.

"aot_eager" makes the same graphs as "inductor", in a tenth of the time; so inductor compiles one
schedule, on a GPU.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import triton
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from flce_dist import filtered, linear_cross_entropy
from flce_dist.options import LossOptions
from flce_dist.testing import error_budget
from tests.problems import DTYPES, pairwise
from tests.test_gpu_oracle import CUDA, each_device, inputs_on

V, H = 1000, 64


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """Embedding, a layer, and the op over the embedding's own weight."""

    def __init__(self, device: str, dtype: torch.dtype, **options: Any) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(V, H, generator=g).to(device, dtype))
        self.mix = nn.Parameter((torch.randn(H, H, generator=g) / H**0.5).to(device, dtype))
        self.options = options

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = nn.functional.embedding(tokens, self.weight)
        hidden = nn.functional.silu(hidden @ self.mix)
        loss = linear_cross_entropy(hidden, self.weight, labels, **self.options)
        return 2.0 * loss.mean()


def batch(T: int, device: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(T)
    tokens = torch.randint(V, (2, T + 1), generator=g).to(device)
    labels = tokens[:, 1:].clone()
    labels[0, 1] = -100
    return tokens[:, :-1], labels


def results(call: Any, model: Model, T: int, device: str) -> dict[str, Tensor]:
    loss = call(*batch(T, device))
    names = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(names.values()))
    return {"loss": loss.detach(), **dict(zip(names, gradients, strict=True))}


@each_device
@pytest.mark.parametrize(
    "options",
    [{"schedule": "recompute", "reduction": "none"}, {"schedule": "cached"},
     {"schedule": "in_forward"}],
    ids=["recompute", "cached", "in_forward"],
)  # fmt: skip
def test_one_graph_for_any_number_of_tokens(options, device):
    """A first compilation, and at most one more for every other number of tokens."""
    model = Model(device, torch.bfloat16, **options)
    exact = Model(device, torch.float64, impl="eager", **options)
    exact.load_state_dict(model.state_dict())
    by_inductor = device == "cuda" and options["schedule"] == "cached"
    counter = CompileCounterWithBackend("inductor" if by_inductor else "aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for T in (48, 65, 100, 33, 77):
        plain = results(model, model, T, device)
        truth = results(exact, exact, T, device)
        # May be off from fp64 by what uncompiled code grants.
        for name, result in results(compiled, model, T, device).items():
            budget = error_budget(result, truth[name], plain[name], dtype=torch.bfloat16)
            assert budget.met, f"{name}: {budget}"
    assert counter.frame_count <= 2


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
