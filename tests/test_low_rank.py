"""``low_rank``: columns of the weight that alone are trained, as LoRA's B on the output layer."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.arguments.options import LossOptions
from flce_dist.compiled import values_of
from flce_dist.core import gradients
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.parallel.vocab import vocab_range
from flce_dist.reference import reference_linear_cross_entropy
from flce_dist.schedules import fit
from flce_dist.testing import run_ranks
from tests.outcomes import Outcome, misses
from tests.problems import Inputs, Patch, both, device_of, each_dtype, make_inputs

T, V, H, R = 60, 300, 24, 8

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing, z-loss": {"label_smoothing": 0.1, "z_loss_weight": 0.01, "vocab_size": V - 9},
    "softcap": {"softcap": 4.0, "logit_scale": 0.7, "reduction": "sum"},
    "counted": {"max_counted": 50},
    "skips": {"skip_ignored": True, "label_smoothing": 0.1},
    "recompute": {"schedule": "recompute"},
    "cached": {"schedule": "cached", "reduction": "none"},
    "part cached": {"schedule": "cached", "max_logits_bytes": T * 4 * 130},
    "in_forward": {"schedule": "in_forward"},
    "chunks": {"schedule": "in_forward", "max_logits_bytes": 16 * V * 4, "reduction": "sum"},
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fit, "_TILE", 8)
    yield


def inputs_of(dtype: torch.dtype = torch.float32, n: int = T) -> Inputs:
    """Whose last R columns of hidden and weight are the low rank's."""
    inputs = make_inputs(n, V, H + R, dtype, bias=True, token_weight=True, temperature=True)
    inputs.labels.clamp_(max=V - 10)
    return inputs


def parts(inputs: Inputs, trained: str = "hidden x b bias") -> dict[str, Tensor]:
    """The operands of a call, by name, as leaves."""
    hidden, x = inputs.hidden.split((H, R), -1)
    weight, b = inputs.weight.split((H, R), 1)
    leaves = {"hidden": hidden, "weight": weight, "x": x, "b": b, "bias": inputs.bias}
    names = trained.split()
    return {k: y.clone().requires_grad_(k in names) for k, y in leaves.items() if y is not None}


def step(leaves: dict[str, Tensor], inputs: Inputs, upstream: Tensor, **options: Any) -> Outcome:
    """Loss and gradients; those by x and b are the last columns of hidden's and weight's."""
    loss = linear_cross_entropy(
        leaves["hidden"], leaves["weight"], inputs.labels, bias=leaves["bias"],
        low_rank=(leaves["x"], leaves["b"]), token_weight=inputs.token_weight,
        temperature=inputs.temperature, **options,
    )  # fmt: skip
    loss.backward(upstream.to(loss).expand_as(loss))
    found = {"dhidden": torch.cat((leaves["hidden"].grad, leaves["x"].grad), -1)}  # type: ignore[arg-type]
    whole = leaves["weight"].requires_grad
    columns = [leaves["weight"].grad, leaves["b"].grad] if whole else [leaves["b"].grad]
    found["dweight"] = torch.cat(columns, 1)  # type: ignore[arg-type]
    return Outcome(loss=loss.detach(), dbias=leaves["bias"].grad, **found)


def textbook(inputs: Inputs, upstream: Tensor, columns: int, **options: Any) -> Outcome:
    hidden, weight = (x.clone().requires_grad_() for x in (inputs.hidden, inputs.weight))
    assert inputs.bias is not None
    bias = inputs.bias.clone().requires_grad_()
    for name in ("max_counted", "skip_ignored", "schedule", "max_logits_bytes"):
        options.pop(name, None)
    loss = reference_linear_cross_entropy(
        hidden, weight, inputs.labels, bias=bias, token_weight=inputs.token_weight,
        temperature=inputs.temperature, **options,
    )[0]  # fmt: skip
    loss.backward(upstream.to(loss).expand_as(loss))
    assert weight.grad is not None
    dweight = weight.grad[:, -columns:]
    return Outcome(loss=loss.detach(), dbias=bias.grad, dhidden=hidden.grad, dweight=dweight)


def check(inputs: Inputs, trained: str, impl: str, **options: Any) -> None:
    upstream = torch.linspace(0.5, 2.0, T) if options.get("reduction") == "none" else torch.ones(())
    there = inputs.to(device_of(impl))
    leaves = parts(there, trained)
    found = step(leaves, there, upstream.to(there.hidden.device), impl=impl, **options)
    actual = Outcome({name: x.cpu() for name, x in found.items()})
    columns = H + R if "weight" in trained.split() else R
    truth = textbook(inputs.to(torch.float64), upstream, columns, **options)
    rounded = textbook(inputs, upstream, columns, **options)
    assert misses(actual, truth, rounded, inputs.dtype) == []


@both
@each_dtype
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name: str, dtype: torch.dtype, impl: str) -> None:
    check(inputs_of(dtype), "hidden x b bias", impl, **OPTIONS[name])


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_smoothing_that_cancels_probabilities(dtype: torch.dtype, impl: str) -> None:
    inputs = inputs_of()
    assert inputs.bias is not None
    near_0 = replace(inputs, weight=inputs.weight / 40, bias=inputs.bias / 40).to(dtype)
    check(near_0, "hidden x b bias", impl, label_smoothing=1.0)


@both
@pytest.mark.parametrize("name", OPTIONS)
def test_a_weight_that_is_trained_too(name: str, impl: str) -> None:
    check(inputs_of(), "hidden weight x b bias", impl, **OPTIONS[name])


@pytest.mark.parametrize("schedule", ["recompute", "cached", "in_forward"])
def test_no_gradient_has_more_than_r_columns(mutate: Patch, schedule: Any) -> None:
    widths: set[int] = set()

    def noting(product: Any, *args: Any, sums_tokens: bool, out: Tensor, **rest: Any) -> None:
        if sums_tokens:
            widths.add(out.shape[1])
        product(*args, sums_tokens=sums_tokens, out=out, **rest)

    mutate(gradients.gemm, "product", noting)
    inputs = inputs_of()
    step(parts(inputs), inputs, torch.ones(()), schedule=schedule)
    assert widths == {R}


@pytest.mark.parametrize("schedule", ["recompute", "in_forward"])
def test_no_dweight_exists(schedule: Any) -> None:
    n, rows, width = 16, 4096, 512
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(k, width, generator=generator) for k in (n, rows))
    x, b = (torch.randn(k, R, generator=generator).requires_grad_() for k in (n, rows))
    labels = torch.arange(n)
    copy, logits = rows * (width + R) * 4, n * rows * 4
    with peak_memory("cpu") as peak:
        loss = linear_cross_entropy(
            hidden, weight, labels, low_rank=(x, b), schedule=schedule, impl="eager"
        )
        loss.backward()
    assert peak.bytes < copy + 8 * logits < copy + weight.nbytes / 2


@pytest.mark.parametrize("frozen", ["x b", "hidden x", "hidden b"])
def test_other_operands_that_are_frozen(frozen: str) -> None:
    inputs = inputs_of(torch.float64)
    trained = " ".join({"hidden", "x", "b", "bias"} - {*frozen.split()})
    leaves = parts(inputs, trained)
    linear_cross_entropy(
        leaves["hidden"], leaves["weight"], inputs.labels, bias=leaves["bias"],
        low_rank=(leaves["x"], leaves["b"]), token_weight=inputs.token_weight,
        temperature=inputs.temperature,
    ).backward()  # fmt: skip
    truth = textbook(inputs, torch.ones(()), H + R)
    whole = {
        "hidden": truth["dhidden"][:, :H],
        "x": truth["dhidden"][:, H:],
        "b": truth["dweight"][:, H:],
        "bias": truth["dbias"],
    }
    for name, expected in whole.items():
        grad = leaves[name].grad
        if name in trained.split():
            torch.testing.assert_close(grad, expected)
        else:
            assert grad is None


@pytest.mark.parametrize(
    ("P", "sequence_parallel", "schedule"),
    [*itertools.product([2, 3], [False, True], ["recompute", "cached", "in_forward"])],
)
def test_on_ranks(P: int, sequence_parallel: bool, schedule: Any) -> None:
    inputs = inputs_of(torch.float64)
    truth = textbook(inputs, torch.ones(()), R, vocab_size=V)

    def rank(group: dist.ProcessGroup) -> Outcome:
        start, end = vocab_range(V, group.rank(), P)
        mine = parts(inputs)
        of_rows = {k: mine[k][start:end].detach() for k in ("weight", "b", "bias")}
        leaves = {**mine, **of_rows}
        if sequence_parallel:
            of_tokens = {k: mine[k].tensor_split(P)[group.rank()].detach() for k in ("hidden", "x")}
            leaves |= of_tokens
        for name, x in leaves.items():
            x.requires_grad_(name != "weight")
        return step(
            leaves, inputs, torch.ones(()), schedule=schedule, tp_group=group, vocab_size=V,
            vocab_range=(start, end), sequence_parallel=sequence_parallel,
        )  # fmt: skip

    ranks = run_ranks(rank, P)
    for name in ("dweight", "dbias"):
        torch.testing.assert_close(torch.cat([x[name] for x in ranks]), truth[name])
    hidden = [x["dhidden"] for x in ranks]
    dhidden = torch.cat(hidden) if sequence_parallel else hidden[0]
    torch.testing.assert_close(dhidden, truth["dhidden"])
    assert all(torch.equal(x["loss"], ranks[0]["loss"]) for x in ranks)


def test_metrics() -> None:
    inputs = inputs_of(torch.float64)
    leaves = parts(inputs)
    keywords: dict[str, Any] = {"token_weight": inputs.token_weight}
    out = linear_cross_entropy_with_metrics(
        leaves["hidden"], leaves["weight"], inputs.labels, bias=leaves["bias"],
        low_rank=(leaves["x"], leaves["b"]), temperature=inputs.temperature, **keywords,
    )  # fmt: skip
    (out.loss + out.entropy.sum()).backward()
    weight = inputs.weight.clone().requires_grad_()
    expected = reference_linear_cross_entropy(
        inputs.hidden, weight, inputs.labels, bias=inputs.bias, temperature=inputs.temperature,
        **keywords,
    )  # fmt: skip
    (expected[0] + expected[3].sum()).backward()
    assert weight.grad is not None
    torch.testing.assert_close(leaves["b"].grad, weight.grad[:, H:])
    torch.testing.assert_close(out.lse, expected[1])


def test_under_autocast_the_factors_are_cast_as_the_weight() -> None:
    inputs = inputs_of()
    leaves = parts(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        actual = step(leaves, inputs, torch.ones(()), schedule="cached")
    rounded = inputs.to(torch.bfloat16)
    leaves = parts(rounded)
    expected = step(leaves, rounded, torch.ones(()), schedule="cached")
    for name in ("loss", "dweight"):
        assert torch.equal(actual[name], expected[name].float()), name
    assert actual["dweight"].dtype == torch.float32


@pytest.mark.parametrize("schedule", ["recompute", "in_forward"])
@pytest.mark.parametrize("trained", ["hidden x b bias", "hidden weight x b bias"])
def test_one_graph_for_any_number_of_tokens(schedule: Any, trained: str) -> None:
    def loss_of(hidden: Tensor, weight: Tensor, x: Tensor, b: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(
            2.0 * hidden, weight, labels, low_rank=(x, b), schedule=schedule
        )

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    for n in (20, 33, 50):
        inputs, found = inputs_of(n=n), []
        functions: list[Any] = [loss_of, compiled]
        for function in functions:
            leaves = parts(inputs, trained)
            names = [x for x in ("hidden", "weight", "x", "b") if x in trained.split()]
            operands = [leaves[x] for x in ("hidden", "weight", "x", "b")]
            loss = function(*operands, inputs.labels)
            found.append((loss, *torch.autograd.grad(loss, [leaves[x] for x in names])))
        for ours, expected in zip(*found, strict=True):
            assert torch.equal(ours, expected)
    assert counter.frame_count == 2


@pytest.mark.parametrize("schedule", ["cached", "in_forward"])
def test_opcheck(schedule: Any) -> None:
    inputs = inputs_of()
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight
    columns = weight[:, H:].clone().requires_grad_()
    spec = (*values_of(LossOptions("sum", schedule=schedule)), None, [True, True, False])
    arguments = (hidden, weight, inputs.labels, None, None, None, columns, *spec)
    opcheck(torch.ops.flce_dist.forward.default, arguments)
