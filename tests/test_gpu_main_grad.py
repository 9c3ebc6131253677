"""accumulate_dweight on a GPU: GEMMs that accumulate in place, memory, graphs.

T tokens, V vocabulary rows, H hidden size.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import filtered, linear_cross_entropy
from flce_dist.memory import peak_memory
from flce_dist.testing import relative_rms
from tests.problems import Inputs
from tests.test_gpu_graphs import Replayed
from tests.test_gpu_oracle import (
    EVERY_SCHEDULE,
    each_device,
    every_schedule,
    inputs_on,
    on_cuda,
    options_of,
)

T, V, H = 130, 36_000, 64
ROUNDING = 2 * torch.finfo(torch.bfloat16).eps

each_main_dtype = pytest.mark.parametrize(
    ("dtype", "main_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ],
    ids=str,
)


def parameter(inputs: Inputs, dtype: torch.dtype) -> Any:
    """The weight with a main_grad of numbers as large as those of dweight."""
    weight: Any = inputs.weight.clone().requires_grad_()
    g = torch.Generator(weight.device).manual_seed(1)
    main_grad = torch.randn(weight.shape, generator=g, device=weight.device)
    weight.main_grad = (1e-3 * main_grad).to(dtype)
    weight.grad_added_to_main_grad = False
    return weight


def step(inputs: Inputs, weight: Tensor, **options: Any) -> Tensor:
    hidden = inputs.hidden.detach().clone().requires_grad_()
    linear_cross_entropy(hidden, weight, inputs.labels, **options).backward()
    assert hidden.grad is not None
    return hidden.grad


@each_device
@every_schedule
@each_main_dtype
def test_what_is_added_is_dweight(dtype, main_dtype, schedule, device):
    inputs = inputs_on(device, T, V, H, dtype)
    options = {"reduction": "sum", "vocab_size": V - 100, **options_of(schedule, inputs)}
    inputs.labels.clamp_(max=V - 101)
    plain: Any = inputs.weight.clone().requires_grad_()
    dhidden = step(inputs, plain, **options)
    weight = parameter(inputs, main_dtype)
    before = weight.main_grad.clone()
    for microbatch in (1, 2):
        assert torch.equal(step(inputs, weight, accumulate_dweight=True, **options), dhidden)
        expected = before.double() + microbatch * plain.grad.double()
        # In fp32 one GEMM may add up in another order than the other.
        assert relative_rms(weight.main_grad, expected) < max(2 * torch.finfo(dtype).eps, 1e-5)
        assert weight.grad_added_to_main_grad and not weight.grad.any()
    assert torch.equal(weight.main_grad[V - 100 :], before[V - 100 :])


@on_cuda
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_allocates_nothing_of_the_weights_size(main_dtype, schedule, device):
    """[131072, 2048] in bf16: 512 MiB, which the run without fusion shows."""
    inputs = inputs_on(device, 1024, 131_072, 2048, torch.bfloat16)
    weight = parameter(inputs, main_dtype)
    del weight.grad_added_to_main_grad

    def peak(fused: bool) -> int:
        hidden = inputs.hidden.clone().requires_grad_()
        loss = linear_cross_entropy(
            hidden, weight, inputs.labels, schedule=schedule, accumulate_dweight=fused
        )
        with peak_memory(inputs.hidden.device) as measured:
            loss.backward()
        weight.grad = None
        return measured.bytes

    for fused in (True, False):  # cuBLAS takes its workspace at the first GEMM
        peak(fused)
    assert peak(False) - peak(True) > 0.9 * weight.nbytes
    assert peak(True) < weight.nbytes


@each_device
@pytest.mark.parametrize("schedule", [*EVERY_SCHEDULE, filtered.schedule(2.0**-9)])
def test_a_replayed_graph_adds_again(schedule, device):
    """To some columns of a wider tensor; its capture would fail if the host waited."""
    inputs = inputs_on(device, T, V, H, torch.bfloat16)
    options = options_of(schedule, inputs)
    weight, wider = parameter(inputs, torch.float32), torch.zeros(V, 200, device=device)
    weight.main_grad = wider[:, 50 : 50 + H]
    replayed = Replayed(lambda: [step(inputs, weight, accumulate_dweight=True, **options)], device)
    weight.main_grad.zero_()
    for _ in range(3):
        replayed.replay()
    plain: Any = inputs.weight.clone().requires_grad_()
    step(inputs, plain, **options)
    assert relative_rms(weight.main_grad, 3 * plain.grad.double()) < ROUNDING
    assert not wider[:, :50].any() and not wider[:, 50 + H :].any()
