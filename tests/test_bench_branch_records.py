"""Differences between branches of a run, from made-up losses: means, standard errors, the table."""

import io
from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("tyro")
pytest.importorskip("rich")

from rich.console import Console

from flce_dist.launch.bench import branches
from flce_dist.launch.bench.branch_records import Branch, Difference, differences, gaps


def branch(head: str, stretch: int, *losses: float | None, rare: float | None = None) -> Branch:
    steps = [100 * (i + 1) for i in range(len(losses))]
    bands: list[dict[str, Any]] = [
        {"from": 0, "tokens": 90, "loss": 2.0 + stretch},
        {"from": 256, "tokens": 10 if rare else 0, "loss": rare},
    ]
    return Branch(stretch, head, steps, list(losses), list(losses), bands, {}, 1.0)


SOME = [
    branch("exact", 0, 3.0, 2.0, rare=9.0),
    branch("filtered", 0, 3.1, 2.3, rare=8.0),
    branch("exact", 1, 4.0, 3.0, rare=8.5),
    branch("filtered", 1, 4.3, 3.1, rare=8.1),
    branch("dropped", 1, 4.5, float("nan")),
    branch("exact", 2, 5.0, None),
    branch("filtered", 2, 5.2, 9.0),
    branch("filtered", 3, 9.0, 9.0),
]


def test_differences_are_within_a_stretch() -> None:
    assert gaps(SOME)["dropped"] == {1: {100: 0.5}}
    assert list(gaps(SOME)["filtered"]) == [0, 1, 2]  # a fourth has no exact branch
    of_all = [each for each in differences(SOME) if each.labels_from is None]
    found = {(each.head, each.step): each for each in of_all}
    assert list(found) == [("filtered", 100), ("filtered", 200), ("dropped", 100)]
    three, two = found["filtered", 100], found["filtered", 200]
    assert (three.n, two.n) == (3, 2)
    assert [three.mean, three.standard_error] == pytest.approx([0.2, 0.1 / 3**0.5])
    assert [two.mean, two.standard_error] == pytest.approx([0.2, 0.1])
    assert found["dropped", 100] == Difference("dropped", 100, None, 0.5, None, 1)
    assert differences(SOME[:1]) == differences(SOME[1:2]) == differences([]) == []


def test_the_last_validations_differ_by_band() -> None:
    bands = [each for each in differences(SOME) if each.labels_from is not None]
    found = {(each.head, each.labels_from): each for each in bands}
    assert list(found) == [("filtered", 0), ("filtered", 256), ("dropped", 0)]
    assert found["filtered", 0] == Difference("filtered", 200, 0, 0.0, 0.0, 3)
    rare = found["filtered", 256]
    assert [rare.mean, rare.standard_error] == pytest.approx([-0.7, 0.3])
    assert rare.n == 2  # of a third stretch there are no such labels


def test_the_table_has_them() -> None:
    out = io.StringIO()
    Console(file=out, width=140).print(branches.table(differences(SOME), {"step": 1600}))
    lines = [line.split() for line in out.getvalue().replace("│", "").splitlines()]
    assert "from step 1600" in out.getvalue()
    assert ["filtered", "100", "all", "+0.20000", "0.05774", "3"] in lines
    assert ["200", "all", "+0.20000", "0.10000", "2"] in lines
    assert ["dropped", "100", "all", "+0.50000", "-", "1"] in lines
    assert ["200", "256", "-0.70000", "0.30000", "2"] in lines
