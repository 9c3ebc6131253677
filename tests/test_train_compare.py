"""The comparison of heads at the end of a run: its numbers and its figure."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from flce_dist.launch.train.compare import HeadResult, compare_heads, comparison_figure
from flce_dist.launch.train.data import IGNORED
from flce_dist.testing import run_ranks
from tests.figures import RESULTS, assert_readable, texts


class FakeAlone:
    """``HeadAlone`` on a rank of two, whose heads give these results."""

    def __init__(self, group: Any) -> None:
        r = group.rank()
        self.group = group
        self.hidden = torch.zeros(4, 1, 2)
        self.weight = torch.zeros(3, 2)
        self.labels = torch.tensor([[1, IGNORED, 2, IGNORED]])
        keywords = {"schedule": "cached", "max_logits_bytes": None}
        self.layer = SimpleNamespace(loss_keywords=keywords)
        loss = torch.tensor([[1.0, 0.0, 3.0, 0.0]])
        one, other = torch.ones(4, 1, 2), torch.full((3, 2), 1.0 + r)
        self.theirs = HeadResult(loss, one, other, 0)
        nearly = torch.tensor([[1.0, 0.0, 3.25, 0.0]])
        # Off on rank 1 alone.
        self.mine = HeadResult(nearly, one + 0.5 * r, other + 0.5 * r, 2 << 20)

    def ours(self, **changes: Any) -> Any:
        return self.mine

    def megatrons(self) -> Any:
        return self.theirs

    def run(self, head: Any) -> Any:
        return head()

    def time_ms(self, head: Any) -> float:
        return 5.0


def test_heads_are_compared_over_all_ranks_and_tokens_that_count():
    def compared(group: Any) -> list[dict[str, Any]]:
        alone: Any = FakeAlone(group)
        return compare_heads(alone)["records"]

    first, second = run_ranks(compared, 2)
    assert first == second
    mine, small, megatron = first
    assert mine["head"] == "ours: cached" and small["head"].startswith("ours: recompute, ")
    for head in (mine, small):
        assert head["loss"] == 4.25 / 2 and head["loss_difference"] == 0.25
        # Half of ones on one of two ranks; of rows of ones and of twos.
        assert head["dhidden_relative_rms"] == pytest.approx((0.25 / 2) ** 0.5)
        assert head["dweight_relative_rms"] == pytest.approx((0.25 / 5) ** 0.5)
        assert head["peak_mib"] == 2.0 and head["time_ms"] == 5.0
    assert megatron["loss"] == 2.0
    assert megatron["loss_difference"] == 0.0 == megatron["dweight_relative_rms"]


def test_the_comparison_of_heads_says_what_it_is_of():
    comparison = json.loads((RESULTS / "head-h200-x2.json").read_text())
    comparison["about"]["commit"] = "abc1234"
    figure = comparison_figure(comparison)
    below = figure.get_supxlabel()
    assert below.startswith("8192 tokens, hidden 4096, 65536 vocabulary rows on each of 2 ranks")
    assert "NVIDIA H200, 2 ranks" in below and "commit abc1234" in below
    peaks = [f"{head['peak_mib']:,.1f}" for head in comparison["records"]]
    assert len(peaks) == 3 and texts(figure, 0) == peaks
    assert_readable(figure)
