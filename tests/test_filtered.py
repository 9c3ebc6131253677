"""Filtered gradients on one rank: what ``filtered.schedule`` approximates, and how closely.

T tokens, V vocabulary rows, H hidden size.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from flce_dist import filtered, linear_cross_entropy_with_metrics
from flce_dist.filtered.oracle import sampled_tokens
from flce_dist.kernels.rows.formulas import RESCUE_ABOVE
from flce_dist.testing import relative_rms
from tests.filtered_formula import (
    GRADIENTS,
    check_filtered,
    definition,
    filtered_gradients,
    zipf_inputs,
)
from tests.outcomes import assert_same
from tests.problems import (
    Upstream,
    device_of,
    each_dtype,
    everywhere,
    inputs,
    make_inputs,
    on_a_gpu,
    per_token_upstream,
    poisoned_memory,
    run_op,
    run_reference,
    with_logits,
)

EPS = 2.0**-9

OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "scale": {"logit_scale": 0.9, "reduction": "sum"},
    "z-loss": {"z_loss_weight": 1e-2},
    "smoothing": {"label_smoothing": 0.1, "z_loss_weight": 1e-3},
    "padding": {"vocab_size": 1111},
    "rounds": {"max_logits_bytes": 300_000},
}


@pytest.mark.parametrize("impl", ["eager", on_a_gpu])
@each_dtype
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_as_defined(impl: str, dtype: torch.dtype, name: str) -> None:
    options = OPTIONS[name]
    problem = zipf_inputs(300, 1300, 16, dtype, bias=True, token_weight=True)
    if "vocab_size" in options:
        labels = problem.labels.clamp(max=options["vocab_size"] - 1)
        problem = replace(problem, labels=labels)
    is_none = options.get("reduction") == "none"
    upstream = Upstream(per_token_upstream(300) if is_none else 3.0)
    with poisoned_memory():
        check_filtered(problem, 2.0**-10, upstream, impl=impl, **options)
    if dtype == torch.float32:
        of_labels, kept = (
            definition(problem, eps, **options).kept.double().mean() for eps in (0.99, 2.0**-10)
        )
        assert 0.1 < of_labels < kept < 0.9


KERNELS: dict[str, tuple[tuple[int, int, int], torch.dtype, float, dict[str, Any]]] = {
    "smoothing": ((130, 520, 16), torch.float32, 2.0**-9, OPTIONS["smoothing"]),
    "none": ((130, 520, 40), torch.bfloat16, 2.0**-9, {"reduction": "none"}),
    "z-loss": ((130, 520, 96), torch.float16, 2.0**-7, OPTIONS["z-loss"]),
    "rounds": ((260, 600, 41), torch.bfloat16, 2.0**-7, {"max_logits_bytes": 1}),
    "rounds, smoothing": ((260, 600, 33), torch.float32, 2.0**-7, {
        "max_logits_bytes": 1, "label_smoothing": 0.1, "reduction": "sum"}),
    "padding": ((140, 600, 16), torch.float32, 2.0**-7, {"vocab_size": 500}),
    "only tiles of labels": ((130, 700, 16), torch.bfloat16, 0.99, {}),
    "all tiles": ((129, 257, 16), torch.float32, 2.0**-40, {}),
    "one token, one row": ((1, 1, 8), torch.float32, 2.0**-6, {}),
    "one tile": ((128, 256, 8), torch.float32, 2.0**-6, {"logit_scale": 0.9}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "bias"), list(zip(KERNELS, itertools.cycle([False, True]))))
def test_triton_computes_what_is_defined(
    monkeypatch: pytest.MonkeyPatch, name: str, bias: bool
) -> None:
    """Small enough for the interpreter; operands by columns if there is no bias."""
    (T, V, H), dtype, eps, options = KERNELS[name]
    problem = zipf_inputs(T, V, H, dtype, bias=bias)
    if "vocab_size" in options:
        problem.labels.clamp_(max=options["vocab_size"] - 1)
    if bias:  # statistics in several segments
        monkeypatch.setattr("flce_dist.kernels.logits.launching.MAX_PART_BYTES", 4 * 3 * T * 4)
    else:
        columns = {x: getattr(problem, x).T.contiguous().T for x in ("hidden", "weight")}
        problem = replace(problem, **columns)
    upstream = Upstream(per_token_upstream(T) if options.get("reduction") == "none" else 3.0)
    with poisoned_memory():
        check_filtered(problem, eps, upstream, impl="triton", **options)


@pytest.mark.parametrize(("T", "V"), [(1, 1), (1, 300), (128, 256), (129, 257), (255, 511)])
def test_sizes(T: int, V: int) -> None:
    check_filtered(zipf_inputs(T, V, 8, torch.float64, ignored=0.0), 2.0**-6)


def test_without_counted_tokens() -> None:
    problem = zipf_inputs(200, 600, 8, ignored=1.1)
    problem.hidden.fill_(torch.nan)
    actual = run_op(problem, Upstream(), impl="eager", schedule=filtered.schedule(EPS))
    assert actual["loss"] == 0 and not actual["dweight"].any() and not actual["dhidden"].any()


def test_rank_one_is_far_closer_than_dropping() -> None:
    problem = zipf_inputs(512, 8000, 64)
    wanted = run_reference(problem.to(torch.float64), Upstream())
    assert 0.15 < definition(problem, EPS).kept.double().mean() < 0.25
    actual = run_op(problem, Upstream(), impl="eager", schedule=filtered.schedule(EPS))
    dropped = filtered_gradients(problem, EPS, drops=True)
    for name, budget, least in (("dhidden", 0.003, 0.1), ("dweight", 0.003, 0.002)):
        assert relative_rms(actual[name], wanted[name]) <= budget
        assert relative_rms(dropped[name], wanted[name]) >= least


@each_dtype
@pytest.mark.parametrize("with_metrics", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_eps_0_is_recompute_bit_by_bit(
    dtype: torch.dtype, with_metrics: bool, label_smoothing: float
) -> None:
    problem = inputs(dtype)
    options: dict[str, Any] = {"impl": "eager", "with_metrics": with_metrics}
    options["label_smoothing"] = label_smoothing
    plain = run_op(problem, Upstream(), schedule="recompute", **options)
    assert_same(plain, run_op(problem, Upstream(), schedule=filtered.schedule(0.0), **options))


@everywhere
def test_metrics_say_what_is_approximated(impl: Any) -> None:
    problem = zipf_inputs(140, 700, 16).to(device_of(impl))
    operands = (problem.hidden, problem.weight, problem.labels)
    truth = definition(problem.to(torch.device("cpu")), EPS)

    plain = linear_cross_entropy_with_metrics(*operands, impl=impl)
    how: dict[str, Any] = {"schedule": filtered.schedule(EPS), "impl": impl}
    for needs_grad in (True, False):  # without a gradient, what it would approximate
        hidden = problem.hidden.clone().requires_grad_(needs_grad)
        out: Any = linear_cross_entropy_with_metrics(hidden, *operands[1:], **how)
        assert out.kept_share.item() == pytest.approx(truth.kept.double().mean().item())
        assert out.rank_one_mass.item() == pytest.approx(truth.rank_one_mass.item(), rel=1e-4)
        assert not out.kept_share.requires_grad and not out.rank_one_mass.requires_grad
        for metric, same in zip(out[:5], plain, strict=True):
            assert torch.allclose(metric, same, rtol=1e-6, atol=1e-6)
    how["schedule"] = filtered.schedule(0.0)
    every: Any = linear_cross_entropy_with_metrics(*operands, **how)
    assert every.kept_share == 1 and every.rank_one_mass == 0


@everywhere
def test_rescued_tokens(impl: str) -> None:
    """Sums relative to a label that lies 50 nats or more below overflow, or are 0 times inf."""
    z = 0.1 * torch.randn(6, 700, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([3, 300, 699, 5, 6, 7])
    z[0, 400], z[1, 400], z[2] = RESCUE_ABOVE + 30, 100.0, z[2] + 200.0
    z[2, 699] = 0.0
    problem = with_logits(z.float(), labels)
    check_filtered(problem, 2.0**-3, largest=200.0, impl=impl)
    bias = torch.zeros(700)
    bias[[3, 300, 5]] = -torch.inf  # labels, and columns of no label in the other rows
    for shift in (0.0, -80.0, -200.0):
        shifted = with_logits((0.1 * z).float().clamp(max=2), labels)
        shifted = replace(shifted, bias=bias + shift)
        how: Any = {"impl": impl, "schedule": filtered.schedule(2.0**-3), "reduction": "none"}
        actual = run_op(shifted, Upstream(torch.ones(6)), **how)
        wanted = filtered_gradients(shifted, 2.0**-3, Upstream(torch.ones(6)), reduction="none")
        for name in GRADIENTS:
            assert relative_rms(actual[name], wanted[name]) <= 1e-4, (name, shift)
        assert abs(actual["dbias"][3] + 1) <= 1e-6, "a banned column has one only at its label"


@everywhere
def test_a_banned_column_gets_no_gradient_where_no_sampled_token_says_how(impl: str) -> None:
    """Rows of tile 1 are impossible after the sampled tokens alone."""
    problem = make_inputs(300, 512, 8, spread=0.1, bias=True, ignored=0.0)
    problem.weight[:, 0] = -(torch.arange(512) // 256)
    problem.hidden[:, 0] = 0.0
    problem.hidden[sampled_tokens(problem.labels >= 0), 0] = 1000.0
    problem.labels.fill_(0)
    assert problem.bias is not None
    problem.bias[400:] = -torch.inf
    actual = check_filtered(problem, 0.5, impl=impl)
    assert not actual["dbias"][400:].any() and not actual["dweight"][400:].any()
