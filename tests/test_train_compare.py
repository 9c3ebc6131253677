"""The figure of the comparison of heads."""

import json

import pytest

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from tests.figures import RESULTS, assert_readable, texts


def test_the_comparison_of_heads_says_what_it_is_of() -> None:
    compare = pytest.importorskip("flce_dist.launch.train.compare", exc_type=ImportError)
    numbers = json.loads((RESULTS / "head-h200-x2.json").read_text())
    figure = compare.comparison_figure({**numbers, "commit": "abc1234"})
    below = figure.get_supxlabel()
    assert below.startswith("8192 tokens, hidden 4096, 65536 vocabulary rows on each of 2 ranks")
    assert "NVIDIA H200, 2 ranks" in below and "commit abc1234" in below
    assert texts(figure, 0) == ["1,888.5", "928.4", "3,072.3"]
    assert_readable(figure)
