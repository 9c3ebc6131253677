"""The caption of figures."""

import pytest

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from flce_dist.launch.about import caption
from tests.figures import ABOUT


def test_the_caption_says_what_the_numbers_hold_for() -> None:
    assert caption(ABOUT, 8.0) == "Some GPU\ncommit abc1234, torch 2.11.0, liger-kernel 0.8.5"
    assert caption({**ABOUT, "ranks": 4}, 8.0).startswith("Some GPU, 4 ranks\n")
    assert max(len(line) for line in caption(ABOUT, 2.0).splitlines()) <= 32
