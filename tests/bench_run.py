"""A benchmark of seconds on CPU, for the tests of ``launch.bench``."""

from pathlib import Path
from typing import Any

import pytest

from flce_dist.launch.bench import __main__ as bench
from flce_dist.launch.bench.files import read_results
from flce_dist.launch.bench.peers import PEERS, Peer

SETTINGS = """
check: gradients
device: cpu
warmup: 1
rounds: 2
sample_ms: 0.5
settle_ms: 0.0
"""
GRID = f"""{SETTINGS}
shapes:
  - {{T: 24, H: 16, V: 64, dtype: fp32}}
  - {{T: 12, H: 16, V: 64, dtype: fp32}}
runs:
"""
EAGER = "  - {impl: eager, schedule: cached}\n"


def arguments(tmp_path: Path, runs: str, grid: str = GRID) -> list[str]:
    (tmp_path / "grid.yaml").write_text(grid + runs)
    return ["--config", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out" / "found.v1")]


def run(tmp_path: Path, runs: str = EAGER, *args: str, grid: str = GRID) -> int:
    return bench.main([*arguments(tmp_path, runs, grid), *args])


def records(tmp_path: Path, impl: str | None = None) -> list[Any]:
    """Those of ``impl``, of which there are some: tests ask something of each."""
    _, found = read_results(tmp_path / "out" / "found.v1.json")
    of_impl = [record for record in found if impl in (None, record.impl)]
    assert of_impl, f"no record of {impl}"
    return of_impl


def peer(
    monkeypatch: pytest.MonkeyPatch, loss_of: Any, name: str = "canonical", parallel: bool = False
) -> None:
    """Add an adapter, or put it in the place of another."""
    monkeypatch.setitem(PEERS, name, Peer(lambda group: loss_of, parallel=parallel))
