"""Small problems, and calls of the op on them, compared with fp64 and eager PyTorch.

Inputs are rounded to the dtype under test, so that all three see the same numbers.
"""

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.arguments.options import ScheduleName
from flce_dist.core import gradients
from flce_dist.kernels import eager
from flce_dist.reference import reference_linear_cross_entropy
from tests.outcomes import Outcome, Results, entropy_rounding, misses

IGNORE = -100
METRICS = ("lse", "logprob", "entropy")


def device_of(impl: str) -> torch.device:
    """Return the device on which tests run ``impl``: triton uses a GPU if there is one."""
    on_gpu = impl == "triton" and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call, in the dtype under test."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None = None
    token_weight: Tensor | None = None
    temperature: Tensor | float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def to(self, target: torch.dtype | torch.device) -> "Inputs":
        """Float operands in another dtype, or everything on another device."""
        names = vars(self) if isinstance(target, torch.device) else ("hidden", "weight", "bias")
        given = {name: getattr(self, name) for name in names}
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        return replace(self, **{name: x.to(target) for name, x in tensors.items()})


def make_inputs(
    T: int, V: int, H: int, dtype: torch.dtype = torch.float32, *, seed: int = 0,
    spread: float = 2.0, bias: bool = False, token_weight: bool = False,
    temperature: bool = False, ignored: float = 0.2,
) -> Inputs:  # fmt: skip
    """Random inputs whose logits have standard deviation ``spread``; some tokens are ignored."""
    g = torch.Generator().manual_seed(1000 * seed + T + V + H)
    labels = torch.randint(V, (T,), generator=g)
    labels[torch.rand(T, generator=g) < ignored] = IGNORE
    return Inputs(
        hidden=torch.randn(T, H, generator=g).to(dtype),
        weight=(spread * torch.randn(V, H, generator=g) / H**0.5).to(dtype),
        labels=labels,
        bias=torch.randn(V, generator=g).to(dtype) if bias else None,
        token_weight=torch.rand(T, generator=g) if token_weight else None,
        temperature=torch.rand(T, generator=g) * 1.5 + 0.5 if temperature else 1.0,
    )


@dataclass(frozen=True)
class Upstream:
    """Upstream gradients; ``metrics`` holds those of lse, logprob and entropy."""

    loss: Tensor | float | None = 1.0
    metrics: Mapping[str, Tensor] | None = None


def per_token_upstream(T: int, *, seed: int = 0) -> Tensor:
    """Different for each token, of both signs, every third one 0."""
    g = torch.randn(T, generator=torch.Generator().manual_seed(seed))
    g[::3] = 0.0
    return g


def metric_upstream(T: int, *names: str) -> dict[str, Tensor]:
    return {name: per_token_upstream(T, seed=METRICS.index(name) + 1) for name in names}


def run(call: Callable[..., tuple], inputs: Inputs, upstream: Upstream, **options: Any) -> Outcome:
    """Run ``call`` forward and backward on new leaves.

    With ``twice`` a second backward must give the same bits, and operands keep theirs.
    """
    twice = options.pop("twice", False)
    leaves = {
        name: x.detach().clone().requires_grad_()
        for name, x in (("hidden", inputs.hidden), ("weight", inputs.weight), ("bias", inputs.bias))
        if x is not None
    }
    of_tokens = {name: getattr(inputs, name) for name in ("labels", "token_weight", "temperature")}
    out = call(**of_tokens, **leaves, **options)
    results = Outcome(zip(("loss", *METRICS, "correct"), out, strict=False))

    heads = []
    gradients = []
    if upstream.loss is not None:
        loss = results["loss"]
        g = torch.as_tensor(upstream.loss, dtype=loss.dtype, device=loss.device)
        heads = [loss]
        gradients = [g.expand_as(loss)]
    for name, g in (upstream.metrics or {}).items():
        heads.append(results[name])
        gradients.append(g.to(results[name]))
    torch.autograd.backward(heads, gradients, retain_graph=twice)
    results.update({name: x.detach() for name, x in results.items()})
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"d{name} is missing"
        assert leaf.grad.dtype == leaf.dtype
        results[f"d{name}"] = leaf.grad
    if twice:
        again = torch.autograd.grad(heads, [*leaves.values()], gradients)
        for (name, leaf), gradient in zip(leaves.items(), again, strict=True):
            assert torch.equal(gradient, results[f"d{name}"]), f"d{name} of a second backward"
            assert_close(leaf.detach(), getattr(inputs, name), rtol=0, atol=0, equal_nan=True)
    return results


def graph(inputs: Inputs, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the loss, and its leaves: copies of hidden, weight and bias."""
    assert inputs.bias is not None
    operands = inputs.hidden, inputs.weight, inputs.bias
    leaves = hidden, weight, bias = [x.detach().clone().requires_grad_() for x in operands]
    return linear_cross_entropy(hidden, weight, inputs.labels, bias=bias, **kwargs), leaves


def run_op(inputs: Inputs, upstream: Upstream, *, impl: str, **options: Any) -> Outcome:
    """Run the op on the device of ``impl``; return results on the CPU."""
    with_metrics = options.pop("with_metrics", bool(upstream.metrics))

    def call(hidden: Tensor, weight: Tensor, labels: Tensor, **kwargs: Any) -> tuple:
        if with_metrics:
            return linear_cross_entropy_with_metrics(hidden, weight, labels, **kwargs)
        return (linear_cross_entropy(hidden, weight, labels, **kwargs),)

    results = run(call, inputs.to(device_of(impl)), upstream, impl=impl, **options)
    return Outcome({name: x.cpu() for name, x in results.items()})


def run_reference(inputs: Inputs, upstream: Upstream, **options: Any) -> Outcome:
    """Run the reference in the dtype of ``inputs``."""
    ours = "schedule", "max_logits_bytes", "max_counted", "skip_ignored", "with_metrics"
    for only_ours in ours:
        options.pop(only_ours, None)
    return run(reference_linear_cross_entropy, inputs, upstream, **options)


def check(
    inputs: Inputs, upstream: Upstream | None = None, *, impl: str = "eager", **options: Any
) -> Outcome:
    """Run the op and compare everything it returns, by name; return its results."""
    upstream = upstream or Upstream()
    actual = run_op(inputs, upstream, impl=impl, **options)
    compare(actual, inputs, upstream, **options)
    return actual


def compare(
    actual: Results, inputs: Inputs, upstream: Upstream, *,
    with_metrics: bool | None = None, without: Collection[str] = (), **options: Any,
) -> None:  # fmt: skip
    """Compare ``actual`` with the reference in fp64; an AssertionError names the result.

    It must have loss and gradients, and metrics as ``run_op`` has, but for those ``without``.
    """
    inputs = inputs.to(torch.device("cpu"))
    truth = run_reference(inputs.to(torch.float64), upstream, **options).without(*without)
    if not (bool(upstream.metrics) if with_metrics is None else with_metrics):
        truth = truth.without(*METRICS, "correct")
    eager = run_reference(inputs, upstream, **options)
    slack = entropy_rounding(truth) if "entropy" in (upstream.metrics or {}) else 0.0
    for miss in misses(actual, truth, eager, inputs.dtype, slack):
        raise AssertionError(miss)


SCHEDULES: list[ScheduleName] = ["recompute", "cached", "in_forward"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Case = TypeVar("Case", bound=tuple[Any, ...])

on_a_gpu = pytest.param("triton", marks=pytest.mark.gpu, id="on a GPU")
both = pytest.mark.parametrize("impl", ["eager", "triton"])
everywhere = pytest.mark.parametrize("impl", ["eager", "triton", on_a_gpu])
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="counts tiles of the interpreter, or patches its kernels"
)

T, V, H = 40, 600, 24  # of ``inputs``; 10 tiles of 64 columns in the interpreter, the last of 24

Patch = Callable[[Any, str, Callable[..., Any]], None]
"""Type of the fixture ``mutate`` in conftest.py."""


def sizes_of_d(mutate: Patch) -> list[int]:
    """Return a list to which each product of a call by ``eager`` adds how large its D is.

    None of them sums over tokens, as for a dweight, and none of a D that is computed again.
    """
    sizes: list[int] = []

    def noting(product: Any, d: Tensor, *others: Any, sums_tokens: bool, **rest: Any) -> None:
        assert not sums_tokens
        sizes.append(d.numel())
        product(d, *others, sums_tokens=sums_tokens, **rest)

    def refuse(dlogits: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("logits are computed again")

    mutate(gradients.gemm, "product", noting)
    mutate(eager, "dlogits", refuse)
    return sizes


def pairwise(cases: Iterable[Case]) -> list[Case]:
    """Choose cases so that every pair of values that occurs in ``cases`` still occurs."""
    every = list(cases)
    pairs_of = [set(itertools.combinations(enumerate(case), 2)) for case in every]
    missing = set().union(*pairs_of)
    chosen = []
    # A case's number of missing pairs, negative, as it was when it was last on top: it only falls.
    # So the case on top, if its number is still right, has more of them than any other.
    most = [(-len(pairs), i) for i, pairs in enumerate(pairs_of)]
    heapq.heapify(most)
    while missing:
        before, i = most[0]
        now = -len(pairs_of[i] & missing)
        heapq.heapreplace(most, (now, i))
        if now == before:
            chosen.append(every[i])
            missing -= pairs_of[i]
    return chosen


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill torch.empty with NaN, so that reads of unwritten elements show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def small(impl: str, **kwargs: Any) -> Inputs:
    """A problem of several partly filled tiles, small enough for the interpreter."""
    return make_inputs(37, 150, 32, bias=True, **kwargs).to(device_of(impl))


def inputs(dtype: torch.dtype = torch.float32) -> Inputs:
    """A problem in which every planted mistake must be detected."""
    return make_inputs(T, V, H, dtype, bias=True, token_weight=True)


def with_logits(z: Tensor, labels: Tensor, dtype: torch.dtype = torch.float32) -> Inputs:
    """Inputs whose logits are exactly ``z`` [T, V], and whose dweight is dlogits, transposed."""
    return Inputs(torch.eye(len(z)).to(dtype), z.T.contiguous().to(dtype), labels)
