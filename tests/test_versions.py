"""What ``python -m tests.versions`` reads and says, without installing anything."""

import re
from pathlib import Path

from tests.versions import FILES, PAIRS, counted, row

ROOT = Path(__file__).parent.parent


def test_counts_of_a_run():
    assert counted("FAILED x\n1 failed, 20 passed, 3 skipped, 4 warnings in 0.10s (0:01:00)\n") == {
        "failed": 1, "passed": 20, "skipped": 3,
    }  # fmt: skip
    assert counted("2 errors in 0.1s") == {"error": 2} and counted("") == {}


def test_a_failure_is_in_the_row_of_the_table():
    found = {"passed": 5, "failed": 2, "error": 1, "skipped": 4}
    assert row("2.9", found) == "| 2.9 | 3.5 | <2.4 | 5 | 3 | 4 |"


def test_pairs_are_those_of_pyproject_and_of_the_docs():
    text = (ROOT / "pyproject.toml").read_text()
    (oldest,), ((first, beyond),) = (
        re.findall(pattern, text) for pattern in (r'"torch>=([\d.]+)"', r'"triton>=(.*),<(.*)"')
    )
    tritons = [pair[1].removeprefix("triton==").removesuffix(".*") for pair in PAIRS.values()]
    assert next(iter(PAIRS)) == oldest and tritons[0] == first
    assert tritons[-1] == f"3.{int(beyond.removeprefix('3.')) - 1}"
    page = (ROOT / "docs" / "testing.md").read_text()
    assert all(f"\n| {torch}" in page for torch in PAIRS)
    assert all((ROOT / "tests" / f"test_{name}.py").exists() for name in FILES)
