"""dweight added into ``weight.main_grad``: its contents, flags and memory, without Megatron.

main_grad begins with numbers as large as dweight, so that what is lost or added twice shows.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from flce_dist import filtered, linear_cross_entropy
from flce_dist.kernels import gemm
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.testing import error_budget, relative_rms
from tests.devices import Replayed, each_device, inputs_on
from tests.parallel_problem import plan_sizes
from tests.problems import (
    SCHEDULES,
    H,
    Inputs,
    T,
    Upstream,
    V,
    device_of,
    each_schedule,
    make_inputs,
    pairwise,
    run_reference,
)

PADDING = 7
REAL = V - PADDING
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.2},
    "softcap and scale": {"softcap": 5.0, "logit_scale": 0.7},
    "z-loss": {"z_loss_weight": 1e-2},
    "counted": {"max_counted": T - 3},
    "skips": {"skip_ignored": True},
}
DTYPES = [  # of the operands, of main_grad
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
]
BESIDE = 8  # columns on either side of a main_grad whose rows are farther apart than H


def problem(dtype: torch.dtype = torch.float32) -> Inputs:
    """The last ``PADDING`` rows of the weight are padding."""
    inputs = make_inputs(T, V, H, dtype, bias=True)
    return replace(inputs, labels=inputs.labels.clamp(max=REAL - 1))


def parameter(
    inputs: Inputs, dtype: torch.dtype = torch.float32, *, flag: bool = True, apart: bool = False
) -> Any:
    """The weight with a main_grad as Megatron's DDP gives it; ``before`` keeps its first value.

    With ``apart`` it is the middle of ``weight.whole``, whose other columns are 0.
    """
    weight: Any = nn.Parameter(inputs.weight.clone())
    g = torch.Generator().manual_seed(5)
    main_grad = torch.randn(weight.shape, generator=g).mul(0.1).to(weight.device, dtype)
    if apart:
        weight.whole = F.pad(main_grad, (BESIDE, BESIDE))
        main_grad = weight.whole[:, BESIDE:-BESIDE]
    weight.main_grad, weight.before = main_grad, main_grad.clone()
    if flag:
        weight.grad_added_to_main_grad = False
    return weight


def loss_of(inputs: Inputs, weight: Any, hidden: Tensor | None = None, **options: Any) -> Tensor:
    keywords = {"vocab_size": REAL, "bias": inputs.bias, "accumulate_dweight": True, **options}
    hidden = inputs.hidden if hidden is None else hidden
    return linear_cross_entropy(hidden, weight, inputs.labels, **keywords)


def step(inputs: Inputs, weight: Any, **options: Any) -> Tensor:
    hidden = inputs.hidden.clone().requires_grad_()
    loss_of(inputs, weight, hidden, **options).backward()
    assert hidden.grad is not None
    return hidden.grad


def unfused(inputs: Inputs, **options: Any) -> Tensor:
    weight = nn.Parameter(inputs.weight.clone())
    step(inputs, weight, accumulate_dweight=False, **options)
    assert weight.grad is not None
    return weight.grad


def assert_added(weight: Any, dweight: Tensor, times: int = 1) -> None:
    """main_grad holds what it held and ``times`` dweight; padding is untouched bit by bit."""
    expected = weight.before.double() + times * dweight.double()
    error = relative_rms(weight.main_grad, expected)
    assert error < 4 * torch.finfo(weight.main_grad.dtype).eps, error
    assert_rest_untouched(weight)


def assert_rest_untouched(weight: Any) -> None:
    """Rows of padding and columns beside main_grad are as they were."""
    assert torch.equal(weight.main_grad[REAL:], weight.before[REAL:])
    if hasattr(weight, "whole"):
        assert not weight.whole[:, :BESIDE].any() and not weight.whole[:, -BESIDE:].any()


CASES = pairwise(
    itertools.product(["eager", "triton"], SCHEDULES, DTYPES, OPTIONS, [False, True], [False, True])
)


@pytest.mark.parametrize(("impl", "schedule", "dtypes", "name", "few_bytes", "apart"), [
    *CASES,
    *(pytest.param(*case, marks=pytest.mark.gpu) for case in CASES if case[0] == "triton"),
], ids=str)  # fmt: skip
@plan_sizes(tile=16, min_window=256, max_window=256)
def test_dweight_is_added_within_the_budget(impl, schedule, dtypes, name, few_bytes, apart):
    """By two microbatches; with few bytes in several chunks or windows."""
    dtype, main = dtypes
    given, options = problem(dtype), {"vocab_size": REAL, "reduction": "sum", **OPTIONS[name]}
    how = {"impl": impl, "schedule": schedule, "max_logits_bytes": 1 if few_bytes else None}
    inputs = given.to(device_of(impl))
    weight, plain = parameter(inputs, main, apart=apart), nn.Parameter(inputs.weight.clone())
    alone = step(inputs, plain, accumulate_dweight=False, **how, **options)
    for _ in range(2):
        assert torch.equal(step(inputs, weight, **how, **options), alone)
    truth = run_reference(given.to(torch.float64), Upstream(), **options)["dweight"]
    eager = run_reference(given, Upstream(), **options)["dweight"]
    before = weight.before.cpu()
    rounded = (before + 2 * eager).to(main)
    against = error_budget(weight.main_grad.cpu(), before + 2 * truth, rounded, dtype=main)
    # An fp32 sum of half-precision operands has their error, whatever its own dtype.
    allowed = against.budget + error_budget(eager, truth, eager, dtype=dtype).budget
    assert against.error <= allowed
    assert_rest_untouched(weight)


@each_schedule
def test_fp32_main_grad_exceeds_the_range_of_fp16(schedule):
    hidden = torch.rand(64, 8, generator=torch.Generator().manual_seed(0)).half()
    weight: Any = nn.Parameter(torch.zeros(5, 8, dtype=torch.float16))
    weight.main_grad = torch.zeros(5, 8)
    loss = linear_cross_entropy(
        hidden, weight, torch.zeros(64).long(), reduction="sum", schedule=schedule,
        accumulate_dweight=True,
    )  # fmt: skip
    (loss * 8000).backward()
    dweight = 8000 * (0.2 - torch.eye(5)[0])[:, None] * hidden.double().sum(0)  # p is 0.2
    assert dweight.abs().max() > torch.finfo(torch.float16).max
    assert relative_rms(weight.main_grad, dweight) < 2e-3


SIZES = {"cpu": (64, 24_576, 128), "cuda": (1024, 131_072, 2048)}  # T, V, H


@each_device
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_allocates_nothing_of_the_weights_size(main_dtype, schedule, device, monkeypatch):
    inputs, options = inputs_on(device, *SIZES[device], torch.bfloat16), {"schedule": schedule}
    if device == "cpu":
        monkeypatch.setattr(gemm, "_UPCAST_BYTES", 1 << 18)
        options["max_logits_bytes"] = 1 << 18
    weight = parameter(inputs, main_dtype, flag=False)

    def peak(fused: bool) -> int:
        hidden = inputs.hidden.clone().requires_grad_()
        given = {"vocab_size": None, "accumulate_dweight": fused, **options}
        loss = loss_of(inputs, weight, hidden, **given)
        with peak_memory(inputs.hidden.device) as measured:
            loss.backward()
        weight.grad = None
        return measured.bytes

    for fused in (True, False):  # cuBLAS takes its workspace at the first GEMM
        peak(fused)
    assert peak(False) - peak(True) > 0.9 * weight.nbytes
    assert peak(True) < weight.nbytes


@each_device
@pytest.mark.parametrize("schedule", [*SCHEDULES, filtered.schedule(2.0**-9)])
def test_a_replayed_graph_adds_again(schedule, device):
    """To some columns of a wider tensor; its capture would fail if the host waited."""
    inputs = problem(torch.bfloat16).to(torch.device(device))
    weight = parameter(inputs, apart=True)
    replayed = Replayed(lambda: [step(inputs, weight, schedule=schedule)], device)
    weight.main_grad.copy_(weight.before)
    for _ in range(3):
        replayed.replay()
    expected = weight.before + 3 * unfused(inputs, schedule=schedule).float()
    assert relative_rms(weight.main_grad, expected) < 2 * torch.finfo(torch.bfloat16).eps
    assert_rest_untouched(weight)


def test_a_wrong_main_grad_is_refused():
    with FakeTensorMode():
        elsewhere = torch.zeros(V, H, device="cuda")
    wrong: dict[str, Any] = {
        "must have an attribute main_grad": None,
        "must have dtype torch.float32, got torch.bfloat16": torch.zeros(V, H).bfloat16(),
        "weight's shape": torch.zeros(V - 1, H),
        "requires_grad=False": torch.zeros(V, H, requires_grad=True),
        "hold data": torch.zeros(V, H, device="meta"),
        "on weight's cpu, got cuda": elsewhere,
        "must be a torch.Tensor, got list": [],
        r"rows that do not overlap, .* got strides \(1, 600\)": torch.zeros(H, V).T,
        r"contiguous rows .*, got strides \(48, 2\)": torch.zeros(V, 2 * H)[:, ::2],
        r"contiguous rows .*, got strides \(0, 1\)": torch.zeros(H).expand(V, H),
        "got a view of negated numbers": torch.zeros(V, H)._neg_view(),
    }
    inputs = problem()
    weight: Any = nn.Parameter(inputs.weight)
    for match, main_grad in wrong.items():
        if main_grad is not None:
            weight.main_grad = main_grad
        with pytest.raises(ValueError, match=match):
            linear_cross_entropy(inputs.hidden, weight, inputs.labels, accumulate_dweight=True)
