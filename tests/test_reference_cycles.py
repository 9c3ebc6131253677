"""What a call holds is freed when its results are, not when Python collects its garbage."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import data_parallel_linear_cross_entropy, linear_divergence
from flce_dist.testing import run_ranks
from tests.function_calls import CALLS
from tests.garbage import tensors_in_cycles

T, H, V, P = 24, 16, 90, 2
WITHOUT_GRADIENTS = "linear_top_k", "linear_sample"


def operands(name: str, parts: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """New ones: a part of the tokens and of the vocabulary."""
    needs_grad = name not in WITHOUT_GRADIENTS
    shapes = (T // parts, H), (V // parts, H)
    hidden, weight = (torch.randn(shape, requires_grad=needs_grad) for shape in shapes)
    return hidden, weight, torch.arange(T)


def differentiated(found: Any) -> None:
    results = found if isinstance(found, tuple) else (found,)
    heads = [x for x in results if x is not None and x.requires_grad]
    if heads:
        torch.autograd.backward(heads, [torch.ones_like(x) for x in heads])


@pytest.mark.parametrize("impl", ["eager", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_of_one_rank(name, impl):
    assert tensors_in_cycles(lambda: differentiated(CALLS[name](*operands(name), impl=impl))) == []


@pytest.mark.parametrize("name", CALLS)
def test_of_ranks(name):
    """Hidden states travel in sections."""

    def rank(group: Any) -> None:
        given: dict[str, Any] = {"tp_group": group, "sequence_parallel": True}
        *shared, labels = operands(name, P)
        if name == data_parallel_linear_cross_entropy.__name__:
            given = {"data_group": group}
            labels = labels[: T // P]
        differentiated(CALLS[name](*shared, labels, **given))

    assert tensors_in_cycles(lambda: run_ranks(rank, P)) == []


@pytest.mark.parametrize("schedule", ["recompute", "cached", "in_forward"])
def test_a_teacher_of_one_call(schedule):
    def call() -> None:
        hidden, weight, _ = operands("linear_divergence")
        teacher = torch.randn(T, 8), torch.randn(V, 8)
        differentiated(linear_divergence(hidden, weight, *teacher, schedule=schedule))

    assert tensors_in_cycles(call) == []
