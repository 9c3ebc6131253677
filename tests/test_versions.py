"""The pairs of ``python -m tests.versions`` are those that the project declares."""

import re
from pathlib import Path

from tests.versions import FILES, PAIRS

ROOT = Path(__file__).parent.parent


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
