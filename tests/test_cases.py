"""Cases that broke other implementations, one test each; most for both implementations."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics, plan
from flce_dist.options import Schedule
from flce_dist.testing import relative_rms
from tests.oracle import (
    IGNORE,
    METRICS,
    Inputs,
    Outcome,
    Upstream,
    check,
    compare,
    device_of,
    make_inputs,
    metric_upstream,
    per_token_upstream,
    run,
    run_op,
    run_reference,
)

IMPLS = ["eager", "triton"]
SCHEDULES: list[Schedule] = ["recompute", "cached", "in_forward"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

both = pytest.mark.parametrize("impl", IMPLS)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch.empty yields NaN: whatever is read before it is written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def with_logits(z: Tensor, labels: Tensor, dtype: torch.dtype = torch.float32) -> Inputs:
    """Inputs whose logits are exactly ``z`` [T, V]: one-hot hidden states pick columns of weight.

    dweight is then dlogits, transposed.
    """
    return Inputs(torch.eye(len(z)).to(dtype), z.T.contiguous().to(dtype), labels)


def small(impl: str, **kwargs: Any) -> Inputs:
    """A problem of several ragged tiles that the interpreter walks quickly."""
    return make_inputs(37, 150, 32, bias=True, **kwargs).to(device_of(impl))


def assert_same(one: Outcome, other: Outcome) -> None:
    """Bitwise."""
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# --- 1, 2: accumulation


@each_dtype
def test_dweight_error_does_not_grow_with_the_number_of_chunks(dtype):
    inputs = make_inputs(4096, 40, 16, dtype)
    truth = run_reference(inputs.to(torch.float64), Upstream())["dweight"]

    def error(**kwargs: Any) -> float:
        return relative_rms(run_op(inputs, Upstream(), impl="eager", **kwargs)["dweight"], truth)

    one = error(schedule="in_forward")
    sixteen = error(schedule="in_forward", max_logits_bytes=1)
    assert sixteen <= 1.2 * one + 1e-7
    assert sixteen <= 1.2 * error(schedule="cached") + 1e-7


@each_dtype
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
def test_dhidden_error_does_not_grow_with_the_number_of_windows(schedule, dtype, monkeypatch):
    inputs = make_inputs(16, 4096, 32, dtype)
    truth = run_reference(inputs.to(torch.float64), Upstream())["dhidden"]

    def error(**kwargs: Any) -> float:
        return relative_rms(run_op(inputs, Upstream(), impl="eager", **kwargs)["dhidden"], truth)

    one = error(schedule=schedule)
    monkeypatch.setattr(plan, "_MIN_WINDOW", 256)
    monkeypatch.setattr(plan, "_MAX_WINDOW", 256)
    assert error(schedule=schedule, max_logits_bytes=4096 * 16) <= 1.2 * one + 1e-7


# --- 3: upstream gradients


@both
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
def test_a_token_without_upstream_gradient_has_none(impl, schedule):
    inputs, g = small(impl), per_token_upstream(37)
    results = check(inputs, Upstream(g), impl=impl, reduction="none", schedule=schedule)
    assert (results["dhidden"][g == 0] == 0).all()
    live = (g != 0) & (inputs.labels.cpu() != IGNORE)
    assert (results["dhidden"][live] != 0).any(1).all()


@both
@each_schedule
@pytest.mark.parametrize("g", [0.0, -3.0, 1e-12, 1e6])
def test_a_scalar_upstream_gradient_other_than_1(impl, schedule, g):
    check(small(impl), Upstream(g), impl=impl, schedule=schedule)


@both
@each_schedule
def test_a_loss_scale_keeps_small_fp16_gradients(impl, schedule):
    """Without the scale they would fall below fp16's 6e-8: it must arrive before the rounding."""
    inputs = make_inputs(64 if impl == "triton" else 2048, 100, 32, torch.float16)
    inputs = replace(inputs, weight=(inputs.weight.float() / 256).half())
    check(inputs, Upstream(65536.0), impl=impl, schedule=schedule)


@both
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiny_upstream_gradients_do_not_underflow(impl, schedule, dtype):
    inputs = make_inputs(20, 150, 32, dtype)
    check(inputs, Upstream(1e-25 * per_token_upstream(20)), impl=impl, schedule=schedule,
          reduction="none")  # fmt: skip


def test_an_upstream_gradient_of_nan_in_an_ignored_row_does_not_leak():
    inputs = small("eager")
    g = torch.ones(37).masked_fill(inputs.labels == IGNORE, torch.nan)
    for metrics in ({}, {name: g for name in METRICS}):
        results = run_op(inputs, Upstream(g, metrics), impl="eager", reduction="none")
        assert all(x.isfinite().all() for x in results.values())


# --- 4: the last tile's columns that do not exist


@both
@each_schedule
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_columns_that_do_not_exist_are_not_counted(impl, schedule, softcap):
    """Every logit is near -30 or -18, so that one phantom exp(0) would be the whole sum."""
    inputs = small(impl)
    assert inputs.bias is not None
    inputs = replace(inputs, bias=inputs.bias - 30.0)
    check(inputs, Upstream(), impl=impl, schedule=schedule, softcap=softcap, with_metrics=True)


@both
@each_schedule
def test_padding_rows_of_weight_are_not_counted_and_get_zeros(impl, schedule, poisoned_memory):
    """They may hold anything: an uninitialised embedding does."""
    inputs = small(impl)
    inputs.labels[inputs.labels >= 130] = 7
    clean = run_op(inputs, Upstream(), impl=impl, schedule=schedule, vocab_size=130)
    weight, bias = inputs.weight.clone(), inputs.bias.clone()  # type: ignore[union-attr]
    weight[130:], bias[130:] = torch.nan, torch.inf
    dirty = run_op(
        replace(inputs, weight=weight, bias=bias),
        Upstream(), impl=impl, schedule=schedule, vocab_size=130, label_smoothing=0.0,
    )  # fmt: skip
    assert_same(clean, dirty)
    assert (clean["dweight"][130:] == 0).all() and (clean["dbias"][130:] == 0).all()
    compare(clean, inputs.to(torch.device("cpu")), Upstream(), vocab_size=130)


# --- 5: extreme logits


def extreme_logits() -> dict[str, tuple[Tensor, Tensor]]:
    """``(logits [T, V], labels [T])`` by what is special; multiples of 1/8, exact in fp32."""
    g = torch.Generator().manual_seed(0)
    T, V = 9, 70
    noise = torch.randint(-16, 17, (T, V), generator=g) / 8
    labels = torch.randint(V, (T,), generator=g)
    at_label = F.one_hot(labels, V).bool()
    at_other = at_label.roll(1, dims=1)
    one_high = torch.zeros(T, V)
    one_high[:, 3] = 1e4
    return {
        "all -1e4": (torch.full((T, V), -1e4), labels),
        "one +1e4, not the label": (one_high, torch.where(labels == 3, 4, labels)),
        "one +1e4, the label": (one_high, torch.full_like(labels, 3)),
        "all equal": (torch.full((T, V), 2.0), labels),
        "all below -88": (noise - 120, labels),
        "all above 88": (noise + 120, labels),
        "label 45 below": (noise.masked_fill(at_other, 45.0), labels),
        "label 60 below": (noise.masked_fill(at_other, 60.0), labels),
        "label 200 below": (noise.masked_fill(at_other, 200.0), labels),
        "label at -1e4": (noise.masked_fill(at_label, -1e4), labels),
        "label 12 above": (noise.masked_fill(at_label, 12.0), labels),
        "label 1000 above": (noise.masked_fill(at_label, 1000.0), labels),
        "one token of each": (
            torch.stack(
                [noise[0], noise[1] - 120, *torch.diag_embed(torch.full((V,), 300.0))[:4],
                 noise[6], noise[7].masked_fill(at_label[7], 12.0), torch.zeros(V)]
            ),
            labels,
        ),
    }  # fmt: skip


EXTREME = extreme_logits()


@both
@each_schedule
@each_dtype
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_logits(name, dtype, schedule, impl):
    z, labels = EXTREME[name]
    if dtype == torch.float16 and name in ("all below -88", "all above 88"):
        # dhidden is a sum of +-120 p that all but cancels: it magnifies the bf16 of fp16's cache.
        schedule = "recompute"
    inputs = with_logits(z, labels, dtype)
    results = run_op(inputs, Upstream(0.7), impl=impl, schedule=schedule, with_metrics=True)
    assert all(x.isfinite().all() for x in results.values())
    if name in ("all -1e4", "all equal"):
        # sum_v dz_v * w_v is 0 for a constant w: only the rounding of its terms is left.
        dhidden = results.pop("dhidden").abs().max()
        assert dhidden <= torch.finfo(dtype).eps * z.abs().max()
    compare(results, inputs, Upstream(0.7))


@both
@pytest.mark.parametrize("name", EXTREME)
def test_gradients_of_metrics_at_extreme_logits(name, impl):
    z, labels = EXTREME[name]
    inputs = with_logits(z, labels)
    upstream = Upstream(None, metric_upstream(len(z), "lse", "logprob"))
    check(inputs, upstream, impl=impl, reduction="none")


@both
@pytest.mark.parametrize("options", [{"z_loss_weight": 1e-2}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("name", ["all below -88", "label 60 below", "one token of each"])
def test_options_at_extreme_logits(name, options, impl):
    z, labels = EXTREME[name]
    for schedule in ("recompute", "cached"):
        check(with_logits(z, labels), Upstream(), impl=impl, schedule=schedule, **options)


@both
@each_dtype
@each_schedule
def test_confident_tokens_keep_relative_accuracy(impl, schedule, dtype):
    """Where ``lse - z_label`` and ``p_label - 1`` cancel, in fp64 too: hence a closed form."""
    margins = torch.arange(2.0, 62.0, 4.0)
    T, V = len(margins), 70
    labels = torch.arange(T) * 4
    at_label = F.one_hot(labels, V).bool()
    inputs = with_logits(at_label * margins[:, None], labels, dtype)
    options: dict[str, Any] = {"impl": impl, "schedule": schedule, "reduction": "sum"}
    results = run_op(inputs, Upstream(), with_metrics=True, **options)

    others = (V - 1) * (-margins.double()).exp()
    loss, p_other = others.log1p(), others / (1 + others) / (V - 1)
    assert ((-results["logprob"] - loss).abs() <= 1e-5 * loss).all()
    expected = torch.where(at_label, -(V - 1) * p_other[:, None], p_other[:, None])
    eps = torch.finfo(dtype).eps
    if dtype == torch.float16:
        # dlogits are p itself, as accurate as fp16 holds it; what is cached was bf16.
        expected = expected.where(expected.abs() >= torch.finfo(dtype).tiny, 0.0)
        eps = eps if schedule == "recompute" else torch.finfo(torch.bfloat16).eps
    error = (results["dweight"].T - expected).abs() / expected.abs()
    assert error[expected != 0].max() <= 2 * eps + 1e-5


# --- 8: layouts


def pad_rows(x: Tensor) -> Tensor:
    """Row stride one element longer: not a multiple of 16 bytes."""
    return F.pad(x, (0, 1))[..., :-1]


def every_other(x: Tensor, dim: int) -> Tensor:
    index = (slice(None),) * dim + (slice(None, None, 2),)
    return x.repeat_interleave(2, dim)[index]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row stride + 1": pad_rows,
    "column major": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: every_other(x, 1),
    "every other row": lambda x: every_other(x, 0),
    "base off 16 bytes": lambda x: F.pad(x.flatten(), (1, 0))[1:].view_as(x),
    "middle of a larger one": lambda x: F.pad(x, (0, 0, 5, 3))[5:-3],
    "backwards in memory": lambda x: x.flip(0).contiguous().flip(0),
}


@both
@pytest.mark.parametrize("of", ["hidden", "weight"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_hidden_and_weight(layout, of, impl):
    """In bf16 rows and bases are off 16 bytes more often than in fp32."""
    lay = LAYOUTS[layout]
    for dtype, schedule in ((torch.bfloat16, "cached"), (torch.float32, "recompute")):
        inputs = make_inputs(33, 70, 32, dtype, bias=True)

        def call(hidden, weight, labels, **kwargs):
            if of == "hidden":
                hidden = lay(hidden)
            else:
                weight = lay(weight)
            return (linear_cross_entropy(hidden, weight, labels, **kwargs),)

        results = run(call, inputs.to(device_of(impl)), Upstream(), impl=impl, schedule=schedule)
        compare({name: x.cpu() for name, x in results.items()}, inputs, Upstream())


@both
@each_schedule
def test_layouts_of_the_others(impl, schedule):
    """Megatron's [b, s] labels against [s, b, H] hidden states; bias and token weights strided."""
    s, b, V, H = 9, 4, 70, 32
    inputs = make_inputs(s * b, V, H, bias=True, token_weight=True).to(device_of(impl))
    truth_inputs = inputs.to(torch.device("cpu"))

    def call(hidden, weight, labels, *, bias, token_weight, **kwargs):
        hidden = hidden.view(s, b, H).transpose(0, 1).contiguous().transpose(0, 1)
        labels = labels.view(s, b).t().contiguous().t()
        token_weight = every_other(token_weight.view(s, b).t().contiguous().t(), 0)
        assert not (hidden.is_contiguous() or labels.is_contiguous())
        loss = linear_cross_entropy(
            hidden, weight, labels, bias=every_other(bias, 0), token_weight=token_weight, **kwargs
        )
        return (loss,)

    results = run(call, inputs, Upstream(), impl=impl, schedule=schedule)
    compare({name: x.cpu() for name, x in results.items()}, truth_inputs, Upstream())


@both
def test_strided_vectors(impl):
    """1-D, where a reshape keeps the stride."""
    inputs = make_inputs(35, 70, 32, bias=True, token_weight=True)
    assert inputs.bias is not None and inputs.token_weight is not None
    strided = replace(
        inputs,
        labels=every_other(inputs.labels, 0),
        bias=every_other(inputs.bias, 0),
        token_weight=every_other(inputs.token_weight, 0),
    )

    def call(hidden, weight, labels, *, bias, **kwargs):
        return (linear_cross_entropy(hidden, weight, labels, bias=every_other(bias, 0), **kwargs),)

    results = run(call, strided.to(device_of(impl)), Upstream(), impl=impl)
    compare({name: x.cpu() for name, x in results.items()}, inputs, Upstream())


@both
def test_hidden_expanded_from_one_row(impl):
    """Stride 0: no descriptor can address it."""
    inputs = make_inputs(35, 70, 32)
    one = inputs.hidden[:1]
    inputs = replace(inputs, hidden=one.expand(35, -1).contiguous()).to(device_of(impl))
    leaf = one.to(inputs.hidden.device).requires_grad_()
    loss = linear_cross_entropy(leaf.expand(35, -1), inputs.weight, inputs.labels, impl=impl)
    loss.backward()
    truth = run_reference(inputs.to(torch.float64), Upstream())
    assert leaf.grad is not None
    assert relative_rms(leaf.grad, truth["dhidden"].sum(0, keepdim=True)) < 1e-5


@both
def test_shapes_are_the_labels_shapes(impl):
    device = device_of(impl)
    for shape in ((), (1,), (2, 3), (2, 1, 3)):
        hidden = torch.randn(*shape, 16, device=device, requires_grad=True)
        weight = torch.randn(7, 16, device=device, requires_grad=True)
        labels = torch.zeros(shape, dtype=torch.int64, device=device)
        out = linear_cross_entropy_with_metrics(hidden, weight, labels, reduction="none", impl=impl)
        assert all(x.shape == shape for x in out)
        out.loss.sum().backward()
        assert hidden.grad is not None and hidden.grad.shape == hidden.shape
        assert linear_cross_entropy(hidden, weight, labels, impl=impl).shape == ()


# --- 9: ignored tokens


@both
@each_schedule
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_all_tokens_ignored_is_an_attached_zero(impl, schedule, reduction):
    inputs = small(impl)
    inputs.labels.fill_(IGNORE)
    inputs.hidden.fill_(torch.nan)
    results = run_op(
        inputs, Upstream(), impl=impl, schedule=schedule, reduction=reduction,
        label_smoothing=0.1, z_loss_weight=0.1, with_metrics=True,
    )  # fmt: skip
    assert results["loss"] == 0
    assert all((x == 0).all() for x in results.values())


@both
@each_schedule
def test_token_weights_of_zero_are_an_attached_zero(impl, schedule):
    inputs = replace(small(impl), token_weight=torch.zeros(37, device=device_of(impl)))
    results = run_op(inputs, Upstream(), impl=impl, schedule=schedule)
    assert results["loss"] == 0
    assert all((x == 0).all() for x in results.values())


@both
@each_schedule
@pytest.mark.parametrize(
    ("dtype", "garbage"),
    [(torch.float32, 1e30), (torch.bfloat16, torch.nan), (torch.float16, -torch.inf)],
    ids=str,
)
def test_what_an_ignored_row_holds_does_not_leak(impl, schedule, dtype, garbage, poisoned_memory):
    inputs = small(impl, token_weight=True).to(dtype)
    dirty = replace(inputs, hidden=inputs.hidden.clone(), token_weight=inputs.token_weight.clone())  # type: ignore[union-attr]
    ignored = inputs.labels == IGNORE
    dirty.hidden[ignored] = garbage
    dirty.token_weight[ignored] = garbage  # type: ignore[index]
    options: dict[str, Any] = {"impl": impl, "schedule": schedule, "label_smoothing": 0.1,
                               "z_loss_weight": 0.1, "with_metrics": True}  # fmt: skip
    results = run_op(dirty, Upstream(2.0), **options)
    assert_same(run_op(inputs, Upstream(2.0), **options), results)
    for name in ("dhidden", *METRICS):
        assert (results[name][ignored.cpu()] == 0).all()


@both
def test_ignored_rows_do_not_leak_through_the_gradients_of_metrics(impl):
    inputs = small(impl)
    inputs.hidden[inputs.labels == IGNORE] = torch.nan
    upstream = Upstream(per_token_upstream(37), metric_upstream(37, *METRICS))
    results = check(inputs.to(torch.device("cpu")), upstream, impl=impl, reduction="none",
                    softcap=5.0)  # fmt: skip
    assert all(x.isfinite().all() for x in results.values())


@both
@each_schedule
@pytest.mark.parametrize("ignore_index", [0, 149, -1])
def test_ignore_index_may_be_a_token_of_the_vocabulary(impl, schedule, ignore_index):
    """Its column still takes part in the softmax of the others."""
    inputs = small(impl, ignored=0.0).to(torch.device("cpu"))
    inputs.labels[::3] = ignore_index
    check(inputs, Upstream(), impl=impl, schedule=schedule, ignore_index=ignore_index,
          label_smoothing=0.1)  # fmt: skip


# --- 10: labels


@both
@each_schedule
def test_int32_labels(impl, schedule):
    inputs = small(impl)
    results = run_op(replace(inputs, labels=inputs.labels.int()), Upstream(), impl=impl,
                     schedule=schedule)  # fmt: skip
    assert_same(run_op(inputs, Upstream(), impl=impl, schedule=schedule), results)


@both
@each_schedule
def test_labels_in_the_first_and_last_column(impl, schedule):
    inputs = small(impl, ignored=0.0).to(torch.device("cpu"))
    inputs.labels[::2], inputs.labels[1::2] = 0, 149
    check(inputs, Upstream(), impl=impl, schedule=schedule, with_metrics=True)


# --- 11: frozen operands


@both
@each_schedule
def test_frozen_operands(impl, schedule, poisoned_memory):
    """Every subset of trainable operands gets the gradients that all together get."""
    inputs = make_inputs(20, 70, 32, bias=True).to(device_of(impl))
    operands = {"hidden": inputs.hidden, "weight": inputs.weight, "bias": inputs.bias}
    expected = run_op(inputs, Upstream(), impl=impl, schedule=schedule, label_smoothing=0.1)
    for trainable in itertools.product([False, True], repeat=3):
        leaves: dict[str, Any] = {
            name: x.detach().clone().requires_grad_(live)  # type: ignore[union-attr]
            for (name, x), live in zip(operands.items(), trainable, strict=True)
        }
        loss = linear_cross_entropy(
            labels=inputs.labels, impl=impl, schedule=schedule, label_smoothing=0.1, **leaves
        )
        # Without gradients in_forward has nothing to do and sums tokens in another order.
        same_order = any(trainable) or schedule != "in_forward"
        assert relative_rms(loss.cpu(), expected["loss"]) <= (0.0 if same_order else 1e-6)
        assert loss.requires_grad == any(trainable)
        if any(trainable):
            loss.backward()
        for name, leaf in leaves.items():
            if leaf.requires_grad:
                assert leaf.grad is not None
                assert torch.equal(leaf.grad.cpu(), expected[f"d{name}"]), name
            else:
                assert leaf.grad is None


# --- 15: the graph


def graph(inputs: Inputs, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
    leaves = [
        x.detach().clone().requires_grad_()
        for x in (inputs.hidden, inputs.weight, inputs.bias)
        if x is not None
    ]
    hidden, weight, bias = leaves
    return linear_cross_entropy(hidden, weight, inputs.labels, bias=bias, **kwargs), leaves


@both
@each_schedule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_second_backward_is_equal_to_the_first(impl, schedule, dtype):
    """And upstream gradients do not stay behind: one of 2 in between changes nothing."""
    loss, leaves = graph(small(impl).to(dtype), impl=impl, schedule=schedule, label_smoothing=0.1)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.autograd.grad(2 * loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@both
def test_a_gradient_of_metrics_in_between_changes_nothing(impl):
    """It recomputes the columns that the cache holds, and must leave the cache as it is."""
    inputs = small(impl)
    hidden = inputs.hidden.clone().requires_grad_()
    weight = inputs.weight.clone().requires_grad_()
    out = linear_cross_entropy_with_metrics(
        hidden, weight, inputs.labels, impl=impl, schedule="cached"
    )
    first = torch.autograd.grad(out.loss, (hidden, weight), retain_graph=True)
    torch.autograd.grad(out.entropy.sum(), (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(out.loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@both
@each_schedule
def test_equal_runs_are_bitwise_equal(impl, schedule):
    inputs = small(impl)
    options = {"impl": impl, "schedule": schedule, "with_metrics": True, "label_smoothing": 0.1}
    assert_same(run_op(inputs, Upstream(), **options), run_op(inputs, Upstream(), **options))


@both
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
@pytest.mark.parametrize("changed", [0, 1], ids=["hidden", "weight"])
def test_a_change_in_place_after_forward_raises(impl, schedule, changed):
    loss, leaves = graph(small(impl), impl=impl, schedule=schedule)
    with torch.no_grad():
        leaves[changed].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_change_in_place_after_in_forward_does_no_harm():
    """It made its gradients in forward and needs the operands no more."""
    inputs = small("eager")
    expected = run_op(inputs, Upstream(), impl="eager", schedule="in_forward")
    loss, leaves = graph(inputs, schedule="in_forward")
    with torch.no_grad():
        leaves[0].zero_()
    loss.backward()
    assert leaves[0].grad is not None
    assert torch.equal(leaves[0].grad, expected["dhidden"])


@each_schedule
def test_metrics_and_loss_may_be_changed_in_place(schedule):
    """What is returned is not what backward reads (or autograd says so)."""
    inputs = small("eager")
    expected = run_op(inputs, Upstream(), impl="eager", schedule=schedule)
    hidden = inputs.hidden.clone().requires_grad_()
    out = linear_cross_entropy_with_metrics(
        hidden, inputs.weight, inputs.labels, bias=inputs.bias, schedule=schedule
    )
    with torch.no_grad():
        out.lse.zero_()
        out.logprob.zero_()
    out.loss.backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, expected["dhidden"])


@each_schedule
def test_a_second_derivative_is_refused(schedule):
    loss, leaves = graph(small("eager"), schedule=schedule)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(loss, leaves, create_graph=True)


def test_gradients_of_metrics_are_refused_under_in_forward():
    inputs = small("eager")
    hidden = inputs.hidden.clone().requires_grad_()
    for name in METRICS:
        out = linear_cross_entropy_with_metrics(
            hidden, inputs.weight, inputs.labels, schedule="in_forward"
        )
        with pytest.raises(NotImplementedError, match="use schedule='recompute'"):
            (out.loss + getattr(out, name).sum()).backward()


def test_correct_has_no_gradient():
    inputs = small("eager")
    hidden = inputs.hidden.clone().requires_grad_()
    for schedule in SCHEDULES:
        out = linear_cross_entropy_with_metrics(
            hidden, inputs.weight, inputs.labels, schedule=schedule
        )
        assert not out.correct.requires_grad
        assert out.correct.dtype == torch.bool


# --- 17: autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@both
@each_schedule
def test_autocast_computes_in_its_dtype_with_fp32_gradients(impl, schedule, dtype):
    """fp32 parameters, whatever hidden comes in; the same bits as casting by hand."""
    inputs = small(impl)
    options = {"impl": impl, "schedule": schedule, "label_smoothing": 0.1}
    by_hand = run_op(inputs.to(dtype), Upstream(), **options)
    for hidden_dtype in (torch.float32, dtype):
        hidden = inputs.hidden.detach().clone().to(hidden_dtype).requires_grad_()
        weight = inputs.weight.clone().requires_grad_()
        bias = inputs.bias.clone().requires_grad_()  # type: ignore[union-attr]
        with torch.autocast(hidden.device.type, dtype):
            loss = linear_cross_entropy(hidden, weight, inputs.labels, bias=bias, **options)
        assert loss.dtype == torch.float32
        assert torch.equal(loss.detach().cpu(), by_hand["loss"])
        loss.backward()
        for name, leaf in (("hidden", hidden), ("weight", weight), ("bias", bias)):
            assert leaf.grad is not None
            assert leaf.grad.dtype == leaf.dtype
            assert torch.equal(leaf.grad.cpu(), by_hand[f"d{name}"].to(leaf.dtype))


@each_schedule
def test_backward_within_autocast_is_the_same(schedule):
    inputs = small("eager")
    with torch.autocast("cpu", torch.bfloat16):
        loss, leaves = graph(inputs, schedule=schedule)
        inside = torch.autograd.grad(loss, leaves, retain_graph=True)
    outside = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_autocast_leaves_fp64_alone():
    inputs = small("eager").to(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels)
        assert F.linear(inputs.hidden, inputs.weight).dtype == torch.float64
    assert loss.dtype == torch.float64


# --- 18: checkpointing and evaluation


@both
@each_schedule
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(impl, schedule, use_reentrant):
    inputs = small(impl)

    def layer(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(2 * hidden, weight, inputs.labels, impl=impl, schedule=schedule)

    def gradients(call: Callable[..., Tensor], **kwargs: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (inputs.hidden, inputs.weight)]
        loss = call(*leaves, **kwargs)
        loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    expected = gradients(layer)
    actual = gradients(lambda *leaves: checkpoint(layer, *leaves, use_reentrant=use_reentrant))
    assert len(actual) == 3
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@both
@each_schedule
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_same_loss_and_no_graph(impl, schedule, mode):
    inputs = small(impl)
    options = {"impl": impl, "schedule": schedule}
    hidden = inputs.hidden.clone().requires_grad_()
    expected = linear_cross_entropy(hidden, inputs.weight, inputs.labels, **options)
    with mode():
        loss = linear_cross_entropy(hidden, inputs.weight, inputs.labels, **options)
        out = linear_cross_entropy_with_metrics(hidden, inputs.weight, inputs.labels, **options)
    assert loss.grad_fn is None and not loss.requires_grad
    assert not any(x.requires_grad for x in out)
    # in_forward sums its chunks one after the other.
    assert relative_rms(loss, expected) <= (1e-6 if schedule == "in_forward" else 0.0)


# --- uninitialised memory


@both
@each_schedule
@each_dtype
def test_nothing_uninitialised_is_read(impl, schedule, dtype, poisoned_memory):
    inputs = small(impl, token_weight=True).to(torch.device("cpu")).to(dtype)
    inputs.labels[inputs.labels >= 140] = 5
    check(inputs, Upstream(2.0), impl=impl, schedule=schedule, with_metrics=True, vocab_size=140,
          label_smoothing=0.1, z_loss_weight=1e-2)  # fmt: skip


@both
def test_nothing_uninitialised_is_read_by_partial_caching(impl, poisoned_memory):
    inputs = make_inputs(20, 1000, 32, bias=True)
    check(inputs, Upstream(2.0), impl=impl, schedule="auto", max_logits_bytes=20 * 4 * 600,
          with_metrics=True)  # fmt: skip
    check(make_inputs(0, 70, 32, bias=True), Upstream(2.0), impl=impl)
