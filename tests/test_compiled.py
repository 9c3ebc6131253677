"""torch.compile keeps the op whole, for any number of tokens."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

from flce_dist import (
    filtered,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
    vocab_range,
)
from flce_dist.arguments.options import LossOptions
from flce_dist.compiled import values_of
from flce_dist.kernels.interface import kernels_of
from flce_dist.reference import reference_linear_cross_entropy
from flce_dist.testing import relative_rms
from tests.devices import each_device, inputs_on
from tests.problems import DTYPES, device_of, everywhere, pairwise

H, V = 16, 70
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute, none": {"schedule": "recompute", "reduction": "none"},
    "cached, padded": {"schedule": "cached", "vocab_size": 65},
    "in_forward": {"schedule": "in_forward", "reduction": "sum"},
    "smoothing and softcap": {"label_smoothing": 0.1, "softcap": 4.0, "z_loss_weight": 0.01},
}


@pytest.fixture(autouse=True)
def forget_what_was_compiled():
    torch._dynamo.reset()


def inputs(T: int, device: Any = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [2, T, H], weight, bias, labels; the same for the same T."""
    generator = torch.Generator().manual_seed(T)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator).to(device).requires_grad_()
        for shape in ((2, T, H), (V, H), (V,))
    )
    labels = torch.randint(0, 60, (2, T), generator=generator)
    labels[0, 1] = -100
    return hidden, weight, bias, labels.to(device)


def plain_loss(hidden, weight, bias, labels, options):
    return linear_cross_entropy(2.0 * hidden, weight, labels, bias=bias, **options).sum()


def loss_of_metrics(hidden, weight, bias, labels, options):
    out = linear_cross_entropy_with_metrics(2.0 * hidden, weight, labels, bias=bias, **options)
    return out.loss.sum() + (out.entropy + 0.1 * out.lse - out.logprob).sum() + out.correct.sum()


def results(fn, T: int, options: dict[str, Any]) -> list[Tensor]:
    hidden, weight, bias, labels = inputs(T, device_of(options.get("impl", "eager")))
    loss = fn(hidden, weight, bias, labels, options)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))]


@pytest.mark.parametrize(("name", "fn", "impl"), [
    ("plain", loss_of_metrics, "eager"),
    ("recompute, none", plain_loss, "triton"),
    ("cached, padded", loss_of_metrics, "triton"),
    ("in_forward", plain_loss, "eager"),
    ("smoothing and softcap", loss_of_metrics, "eager"),
    *(pytest.param(name, plain_loss, "triton", marks=pytest.mark.gpu) for name in OPTIONS),
])  # fmt: skip
def test_one_graph_for_any_number_of_tokens(name, fn, impl):
    options = {**OPTIONS[name], "impl": impl}
    # The same graphs as inductor makes, in a tenth of the time; so that compiles one, on a GPU.
    by_inductor = torch.cuda.is_available() and name == "cached, padded"
    counter = CompileCounterWithBackend("inductor" if by_inductor else "aot_eager")
    compiled = torch.compile(fn, fullgraph=True, backend=counter)
    for T in (9, 13, 6):
        pair = results(compiled, T, options), results(fn, T, options)
        for ours, expected in zip(*pair, strict=True):
            assert torch.equal(ours, expected) or relative_rms(ours, expected) < 1e-6 * by_inductor
    assert counter.frame_count == 2  # one for the first T, one for every other


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("name", ["plain", "recompute, none", "cached, padded", "in_forward"])
def test_one_graph_for_windows_of_any_size(name, with_gradients):
    """Of more tokens windows have fewer columns, or their sizes another form."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(plain_loss, fullgraph=True, backend=counter)
    with torch.set_grad_enabled(with_gradients):
        for T in (9, 13, 2500, 9000):
            found, expected = (call(*inputs(T), OPTIONS[name]) for call in (compiled, plain_loss))
            assert torch.equal(found, expected)
    assert counter.frame_count == 2  # one for the first T, one for every other


METRICS = ("lse", "logprob", "entropy")


def loss_and_metrics(hidden, weight, bias, labels, options):
    return linear_cross_entropy_with_metrics(hidden, weight, labels, bias=bias, **options)


@everywhere
@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("asked", [(), ("lse",), ("logprob",), ("entropy",), METRICS], ids=str)
def test_cached_columns_serve_all_gradients_but_the_entropys(impl, compiles, asked, monkeypatch):
    """Compiled code returns metrics, whose gradients are zeros where nobody asks for them."""
    options = {"schedule": "cached", "label_smoothing": 0.1, "impl": impl}
    step: Any = loss_and_metrics
    launches: list[Any] = []
    if compiles:
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    kernels = kernels_of(impl)
    compute = kernels.dlogits

    def counted(*arguments: Any, **out: Any) -> None:
        launches.append(out)
        compute(*arguments, **out)

    monkeypatch.setattr(kernels, "dlogits", counted)
    gradients = {}
    for schedule in ("cached", "recompute"):
        launches.clear()
        given = inputs(9, device_of(impl))
        out = step(*given, options | {"schedule": schedule})
        heads = [out.loss, *(getattr(out, name).sum() for name in asked)]
        gradients[schedule] = torch.autograd.grad(heads, given[:3])
        if schedule == "recompute" or "entropy" in asked:
            assert launches
        else:
            assert not launches or given[0].is_cuda  # there the host does not know
    for ours, expected in zip(*gradients.values(), strict=True):
        assert relative_rms(ours, expected) <= 1e-6


def test_under_no_grad():
    compiled = torch.compile(plain_loss, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*inputs(9), {}), plain_loss(*inputs(9), {}))


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "eager") for name in OPTIONS), ("in_forward", "aot_eager")]
)
def test_under_autocast(name, backend):
    """With backend="eager" operators run under autocast, which must not reach their GEMMs."""
    options = OPTIONS[name]
    compiled = torch.compile(plain_loss, fullgraph=True, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, expected = results(compiled, 9, options), results(plain_loss, 9, options)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


HIDDEN, WEIGHT, BIAS, LABELS = inputs(9)


@pytest.mark.parametrize(("fn", "changes", "options", "message"), [
    (plain_loss, {1: WEIGHT[:, 1:]}, {}, r"weight must be \[V, H\] with H = 16 from hidden"),
    (plain_loss, {}, {"vocab_size": True}, "vocab_size must be None or an int .*, got True"),
    (plain_loss, {3: LABELS + 60}, {}, r"labels must be within \[0, 70\)"),
    (loss_of_metrics, {}, {"schedule": "in_forward"},
     r"under torch\.compile .* takes schedule='in_forward' only"),
    (plain_loss, {}, {"accumulate_dweight": True}, r"not supported under torch\.compile"),
])  # fmt: skip
def test_refusals_keep_their_message(fn, changes, options, message):
    """Without fullgraph=True Dynamo breaks the graph where it cannot compile."""
    arguments = dict(enumerate((HIDDEN, WEIGHT, BIAS, LABELS))) | changes
    with pytest.raises(Exception, match=message):
        torch.compile(fn, fullgraph=True, backend="aot_eager")(*arguments.values(), options)


@pytest.mark.parametrize(("schedule", "frozen"), [("in_forward", False), ("auto", True)])
def test_gradients_made_in_forward_take_one_graph_for_any_number_of_tokens(schedule, frozen):
    """Chunks are smaller than some of these calls."""
    graphs = CompileCounterWithBackend("aot_eager")
    options = {"schedule": schedule, "max_logits_bytes": 300 * 70 * 4}
    step = torch.compile(linear_cross_entropy, backend=graphs, fullgraph=True)
    for T in (9, 150, 601):
        hidden, weight, _, labels = inputs(T)
        loss = step(hidden, weight.requires_grad_(not frozen), labels, **options)
        truth = reference_linear_cross_entropy(hidden.double(), weight.double(), labels)[0]
        (gradient,) = torch.autograd.grad(loss, hidden)
        assert relative_rms(gradient, torch.autograd.grad(truth, hidden)[0]) <= 1e-5
    assert graphs.frame_count == 2  # one for the first T, one for every other


def test_transforms_are_refused_by_name():
    hidden, weight, _, labels = inputs(3)
    gradient = torch.func.grad(lambda weight: linear_cross_entropy(hidden, weight, labels))
    with pytest.raises(NotImplementedError, match=r"torch\.func .* use backward or torch"):
        torch.compile(gradient, backend="eager")(weight)


FILTERED = filtered.schedule(2.0**-12)
WAYS = [
    *((schedule, "mean", False) for schedule in ("in_forward", FILTERED)),
    *itertools.product(["auto", "recompute", "cached"], ["mean", "none"], [False, True]),
]
EXAMINED = pairwise((*how, dtype) for how in WAYS for dtype in DTYPES)
WITH_BACKWARD = {case[:3]: case for case in reversed(EXAMINED)}.values()
"""One dtype of each way: a step takes twenty times as long as all else that is examined."""


@each_device
@pytest.mark.parametrize(("schedule", "reduction", "with_metrics", "dtype"), EXAMINED, ids=str)
def test_opcheck(schedule, reduction, with_metrics, dtype, device):
    """Schema, fake, autograd registration and dynamic shapes, by PyTorch's own examiner."""
    given = inputs_on(device, 66, 1000, 64, dtype, bias=True, ignored=0.0)
    leaves = (given.hidden.view(2, 33, 64), given.weight, given.bias)
    hidden, weight, bias = (x.requires_grad_() for x in leaves if x is not None)
    options = LossOptions(
        reduction, label_smoothing=0.1, z_loss_weight=0.01, logit_scale=0.5,
        schedule=schedule, with_metrics=with_metrics,
    )  # fmt: skip
    spec = (*values_of(options), None, [True] * 3)
    temperature = torch.linspace(0.5, 2.0, 66, device=device).view(2, 33)
    arguments = (hidden, weight, given.labels.view(2, 33), bias, None, temperature, None, *spec)
    parts = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if (schedule, reduction, with_metrics, dtype) in WITH_BACKWARD:
        parts.append("test_aot_dispatch_dynamic")
    opcheck(torch.ops.flce_dist.forward.default, arguments, test_utils=parts)


@pytest.mark.parametrize("schedule", ["in_forward", "cached"])
def test_fakes_have_the_strides_of_results(schedule):
    """Of hidden by columns, too, whose gradient is by rows."""
    hidden, weight, bias, labels = (x.detach() for x in inputs(9))
    hidden = hidden.flatten(0, -2).T.contiguous().T
    spec = (*values_of(LossOptions("sum", schedule=schedule)), None, [True] * 3)
    operands, mode = (hidden, weight, labels.flatten(), bias), FakeTensorMode()
    none = (None, None, None)
    real = torch.ops.flce_dist.forward(*operands, *none, *spec)
    fakes = torch.ops.flce_dist.forward(*map(mode.from_tensor, operands), *none, *spec)
    assert [(x.shape, x.stride()) for x in fakes] == [(x.shape, x.stride()) for x in real]


def test_gradients_of_fp16_have_the_dtype_of_their_fakes():
    """In_forward saves dweight in fp32."""
    hidden, weight, bias, labels = (x.detach() for x in inputs(9))
    operands = (hidden.half(), weight.half(), labels, bias.half(), None, None, None)
    spec = (*dataclasses.astuple(LossOptions("sum", schedule="in_forward")), None, [True] * 3)
    loss, *saved = torch.ops.flce_dist.forward(*operands, *spec)
    upstream = (torch.ones_like(loss), None, None, None)
    gradients = torch.ops.flce_dist.backward(*upstream, *operands, saved, *spec)
    assert [x.dtype for x in gradients] == [torch.float16] * 3


@pytest.mark.parametrize("schedule", ["recompute", "in_forward"])
def test_a_weight_whose_memory_was_freed_before_backward(schedule):
    """As FSDP2's reshard does."""
    hidden, weight = torch.randn(6, 4), torch.randn(5, 4, requires_grad=True)
    step = torch.compile(partial(linear_cross_entropy, schedule=schedule), backend="aot_eager")
    loss = step(hidden, weight, torch.arange(6) % 5)
    weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="weight must not be resharded between forward and back"):
        loss.backward()


def test_a_shard_of_symbolic_sizes():
    def middle(x: Tensor, world_size: int) -> Tensor:
        return x[slice(*vocab_range(len(x), 1, world_size))]

    compiled = torch.compile(middle, backend="eager", dynamic=True, fullgraph=True)
    for n, world_size in ((8, 3), (11, 3), (11, 2)):
        x = torch.arange(n)
        assert torch.equal(compiled(x, world_size), middle(x, world_size))
