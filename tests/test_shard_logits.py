"""Operands of any layout, labels of any kind, and ignored rows that hold anything."""

import itertools
import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flce_dist import filtered, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.kernels.interface import kernels_of
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.testing import relative_rms
from tests.problems import (
    METRICS,
    SCHEDULES,
    Upstream,
    both,
    check,
    compare,
    device_of,
    each_schedule,
    interpreted,
    make_inputs,
    metric_upstream,
    pairwise,
    per_token_upstream,
    run,
    run_op,
    run_reference,
    small,
)


def negated(x: Tensor) -> Tensor:
    """A view of the memory of -x, as of the imaginary part of a conjugate: kernels read memory."""
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg() and not view.resolve_neg().is_neg()
    return view


def every_other(x: Tensor, dim: int) -> Tensor:
    """``x`` again, as every other slice of a tensor twice as long."""
    return x.repeat_interleave(2, dim)[(slice(None),) * dim + (slice(None, None, 2),)]


MATRICES: dict[str, Callable[[Tensor], Tensor]] = {
    "row stride + 1": lambda x: F.pad(x, (0, 1))[..., :-1],  # no multiple of 16 bytes
    "column major": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: every_other(x, 1),
    "every other row": lambda x: every_other(x, 0),
    "base off 16 bytes": lambda x: F.pad(x.flatten(), (1, 0))[1:].view_as(x),
    "middle of a larger one": lambda x: F.pad(x, (0, 0, 5, 3))[5:-3],
    "negated": negated,
}
VECTORS = {"every other row": MATRICES["every other row"], "negated": negated}
CASES = [
    *itertools.product(("hidden", "weight"), MATRICES, SCHEDULES),
    *itertools.product(("bias", "token_weight"), VECTORS, SCHEDULES),
    *itertools.product(("labels",), ("every other row",), SCHEDULES),
]


def laid_out(
    op: Callable[..., Tensor], layout: Callable[[Tensor], Tensor], *names: str
) -> Callable[..., tuple[Tensor]]:
    def call(**given: Any) -> tuple[Tensor]:
        return (op(**given | {name: layout(given[name]) for name in names}),)

    return call


@both
@pytest.mark.parametrize(("name", "layout", "schedule"), pairwise(CASES))
def test_layouts(name, layout, schedule, impl):
    """In bf16 rows and bases are off 16 bytes more often than in fp32."""
    fp32 = schedule == "recompute" or layout == "negated"
    dtype = torch.float32 if fp32 else torch.bfloat16
    inputs = make_inputs(33, 70, 32, dtype, bias=True, token_weight=True)
    call = laid_out(linear_cross_entropy, MATRICES[layout], name)
    results = run(call, inputs.to(device_of(impl)), Upstream(), impl=impl, schedule=schedule)
    compare({name: x.cpu() for name, x in results.items()}, inputs, Upstream())


@both
@each_schedule
def test_negated_upstream_gradients(schedule, impl):
    inputs = make_inputs(20, 70, 16, bias=True)
    g, metrics = per_token_upstream(20), metric_upstream(20, *METRICS)
    options: dict[str, Any] = {"reduction": "none"}
    if schedule == "in_forward":
        g, metrics, options = torch.tensor(0.7), {}, {}
    given = Upstream(negated(g), {name: negated(x) for name, x in metrics.items()})
    results = run_op(inputs, given, impl=impl, schedule=schedule, **options)
    compare(results, inputs, Upstream(g, metrics), **options)


@both
def test_hidden_expanded_from_one_row(impl):
    """Stride 0: no descriptor can address it."""
    inputs = make_inputs(35, 70, 32)
    inputs = replace(inputs, hidden=inputs.hidden[:1])
    call = laid_out(linear_cross_entropy, lambda one: one.expand(35, -1), "hidden")
    actual = run(call, inputs.to(device_of(impl)), Upstream(), impl=impl)["dhidden"]
    whole = replace(inputs, hidden=inputs.hidden.expand(35, -1).contiguous())
    wanted = run_reference(whole.to(torch.float64), Upstream())["dhidden"].sum(0, keepdim=True)
    assert relative_rms(actual.cpu(), wanted) < 1e-5


@both
def test_shapes_are_the_labels_shapes(impl):
    device = device_of(impl)
    for shape in ((), (1,), (2, 3), (2, 1, 3)):
        hidden = torch.randn(*shape, 16, device=device, requires_grad=True)
        weight = torch.randn(7, 16, device=device, requires_grad=True)
        labels = torch.zeros(shape, dtype=torch.int64, device=device)
        out = linear_cross_entropy_with_metrics(hidden, weight, labels, reduction="none", impl=impl)
        assert all(x.shape == shape for x in out[:5])
        out.loss.sum().backward()
        assert hidden.grad is not None and hidden.grad.shape == hidden.shape
        assert linear_cross_entropy(hidden, weight, labels, impl=impl).shape == ()


@both
@each_schedule
def test_column_major_hidden_that_is_frozen(impl, schedule):
    """Then dweight's scaled copy of hidden has memory of its own, without its strides."""
    inputs = make_inputs(33, 70, 32)
    given = inputs.to(device_of(impl))
    hidden, weight = given.hidden.t().contiguous().t(), given.weight.clone().requires_grad_()
    linear_cross_entropy(hidden, weight, given.labels, impl=impl, schedule=schedule).backward()
    assert weight.grad is not None
    wanted = run_reference(inputs.to(torch.float64), Upstream())["dweight"]
    assert relative_rms(weight.grad.cpu(), wanted) < 3e-6


def far_apart(x: Tensor) -> Tensor:
    """``x`` again, its last dimension spread over more than 2**31 elements of untouched memory.

    An offset that wraps would lie as far below the first element: that is mapped, too, and zero.
    """
    stride = (1 << 31) // (x.shape[-1] - 1) + 1
    size = (1 << 31) + stride * (x.shape[-1] - 1) + len(x)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, named by Python 3.13
    memory = torch.frombuffer(mmap.mmap(-1, x.itemsize * size, flags=flags), dtype=x.dtype)
    strides = (1, stride)[-x.dim() :]
    return x.new_empty(0).set_(memory.untyped_storage(), 1 << 31, x.shape, strides).copy_(x)


class FarApart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return far_apart(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


@interpreted
@pytest.mark.parametrize("schedule", [*SCHEDULES, filtered.schedule(0.5)])
def test_columns_that_lie_more_than_2_to_the_31_elements_apart(schedule):
    """Also of an upstream gradient per token. Filtered gradients of one tile are exact."""
    inputs = make_inputs(33, 70, 4, torch.bfloat16)
    upstream = Upstream()
    options: dict[str, Any] = {}
    if schedule != "in_forward":
        upstream, options = Upstream(far_apart(torch.randn(33))), {"reduction": "none"}
    call = laid_out(linear_cross_entropy, FarApart.apply, "hidden", "weight")
    results = run(call, inputs, upstream, impl="triton", schedule=schedule, **options)
    compare(results, inputs, upstream, **options)


@both
@each_schedule
@pytest.mark.parametrize("ignore_index", [0, 149, -1])
def test_ignore_index_may_be_a_token_of_the_vocabulary(impl, schedule, ignore_index):
    """Its column still takes part in the softmax of the others."""
    inputs = small(impl, ignored=0.0).to(torch.device("cpu"))
    inputs.labels[::3] = ignore_index
    check(inputs, Upstream(), impl=impl, schedule=schedule, ignore_index=ignore_index,
          label_smoothing=0.1)  # fmt: skip


@both
def test_an_ignored_label_has_no_logit(impl):
    hidden, weight, labels, *_ = vars(small(impl, ignored=0.0)).values()
    labels[::3] = 5
    logits = ShardLogits(hidden, weight, None, labels, 0, 5, 1.0, None)
    found = kernels_of(impl).logits_at_ids(logits, labels, None, vocab_size=len(weight))
    every = (hidden.float() * weight[labels].float()).sum(1)
    torch.testing.assert_close(found, every.where(labels != 5, 0.0))
