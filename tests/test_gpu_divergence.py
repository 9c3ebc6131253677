"""``linear_divergence`` on a GPU: sizes that fill it, its memory, and what the host waits for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_divergence
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.testing import relative_rms
from tests.divergence_problem import each_kind

pytestmark = pytest.mark.gpu

T, V, H = 3000, 50000, 1024


def models(requires_grad: bool = True) -> list[Tensor]:
    g = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "generator": g, "dtype": torch.bfloat16}
    drawn = [torch.randn(n, H, **options) for n in (T, V, T, V)]
    drawn = [x if len(x) == T else x.mul_(2 / H**0.5) for x in drawn]
    return [x.requires_grad_(requires_grad and i < 2) for i, x in enumerate(drawn)]


def results(operands: list[Tensor], kind: Any, **options: Any) -> tuple[Tensor, ...]:
    loss = linear_divergence(*operands, kind=kind, **options)
    return loss.detach(), *torch.autograd.grad(loss, operands[:2])


@each_kind
def test_chunks_of_any_size_give_the_same_and_runs_equal_bits(kind: str) -> None:
    operands = models()
    few = results(operands, kind, max_logits_bytes=1 << 27)
    again = results(operands, kind, max_logits_bytes=1 << 27)
    assert all(map(torch.equal, few, again))
    at_once = results(operands, kind, max_logits_bytes=1 << 33)
    assert relative_rms(few[0], at_once[0]) <= 1e-5
    assert all(relative_rms(x, y) <= 6e-3 for x, y in zip(few[1:], at_once[1:], strict=True))


@each_kind
def test_equal_models(kind: str) -> None:
    hidden, weight, *_ = models()
    found = results([hidden, weight, hidden.detach(), weight.detach()], kind)
    assert not any(x.any() for x in found)


@each_kind
def test_memory_stays_within_the_budget(kind: str) -> None:
    operands, budget = models(), 1 << 28
    results(operands, kind, max_logits_bytes=budget)
    with peak_memory(operands[0].device) as peak:
        results(operands, kind, max_logits_bytes=budget)
    gradients = sum(x.nbytes for x in operands[:2])
    assert peak.bytes - gradients <= budget + (64 << 20)


@each_kind
def test_the_host_does_not_wait(kind: str) -> None:
    operands = models()
    for options in ({}, {"schedule": "recompute"}, {"skip_ignored": True}):
        results(operands, kind, **options)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            results(operands, kind, **options)
        finally:
            torch.cuda.set_sync_debug_mode(before)
