"""flce_dist.memory, on programs whose peak is known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flce_dist.memory import peak_memory

MIB = 2**20


def mib(n: int) -> torch.Tensor:
    return torch.empty(n * MIB, dtype=torch.uint8)


def freed_in_between() -> None:
    a, b = mib(3), mib(2)
    del a, b
    mib(4)


def kept_with_a_view() -> Any:
    kept = mib(2)
    return kept, kept.view(torch.int32)[1:]


BEFORE = torch.randn(512, 512, requires_grad=True)  # 1 MiB
LOSS = BEFORE.exp().sum()


@pytest.mark.parametrize(
    ("program", "expected_mib"),
    [
        (freed_in_between, 5),
        (kept_with_a_view, 2),
        (lambda: BEFORE.exp().sum(), 1),  # saves exp(x)
        (lambda: LOSS.backward(retain_graph=True), 1),  # dx
        (lambda: torch.logsumexp(BEFORE.detach(), dim=1), 1),  # exponentiates a copy of x
    ],
)
def test_the_peak_of_a_program(program: Callable[[], Any], expected_mib: int) -> None:
    BEFORE.grad = None
    with peak_memory("cpu") as peak:
        kept = program()
    del kept
    assert abs(peak.bytes - expected_mib * MIB) < 0.1 * MIB


def test_overlapping_blocks_are_refused_and_leave_it_usable() -> None:
    with pytest.raises(RuntimeError, match="must not overlap"), peak_memory("cpu"):
        with peak_memory("cpu"):
            pass
    with peak_memory("cpu") as peak:
        mib(1)
    assert peak.bytes >= MIB
