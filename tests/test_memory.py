"""flce_dist.memory, on programs whose peak is known."""

import pytest
import torch

from flce_dist.memory import peak_memory

MIB = 2**20
SLACK_BYTES = 4096


def mib(n: int) -> torch.Tensor:
    return torch.empty(n * MIB, dtype=torch.uint8)


def test_peak_is_the_most_at_one_time_not_the_sum() -> None:
    with peak_memory("cpu") as peak:
        a = mib(3)
        b = mib(2)
        del a, b
        c = mib(4)
        del c
    assert abs(peak.bytes - 5 * MIB) < SLACK_BYTES


def test_tensors_from_before_are_not_counted() -> None:
    before = mib(8)
    with peak_memory("cpu") as peak:
        assert before.numel() == 8 * MIB
    assert peak.bytes < SLACK_BYTES


def test_views_count_once_and_kept_tensors_count() -> None:
    kept = []
    with peak_memory("cpu") as peak:
        kept.append(mib(2))
        kept.append(kept[0].view(torch.int32)[1:])
    assert abs(peak.bytes - 2 * MIB) < SLACK_BYTES


def test_backward_is_counted() -> None:
    x = torch.randn(512, 512, requires_grad=True)  # 1 MiB
    with peak_memory("cpu") as forward:
        loss = x.exp().sum()  # saves exp(x): 1 MiB
    with peak_memory("cpu") as backward:
        loss.backward()  # dx: 1 MiB
    assert abs(forward.bytes - MIB) < SLACK_BYTES
    assert abs(backward.bytes - MIB) < SLACK_BYTES


def test_temporaries_inside_an_operator_are_counted() -> None:
    x = torch.randn(512, 512)
    with peak_memory("cpu") as peak, torch.no_grad():
        torch.logsumexp(x, dim=1)  # returns 2 KiB, but exponentiates a copy of x
    assert peak.bytes > 0.9 * MIB


def test_same_twice() -> None:
    x = torch.randn(256, 256, requires_grad=True)
    peaks = []
    for _ in range(2):
        with peak_memory("cpu") as peak:
            torch.logsumexp(x @ x, dim=1).sum().backward()
        x.grad = None
        peaks.append(peak.bytes)
    assert peaks[0] == peaks[1] > 0


def test_overlapping_blocks_are_refused_and_leave_it_usable() -> None:
    with pytest.raises(RuntimeError, match="must not overlap"), peak_memory("cpu"):
        with peak_memory("cpu"):
            pass
    with peak_memory("cpu") as peak:
        del_me = mib(1)
        del del_me
    assert peak.bytes >= MIB
