"""``python -m tests.contract``: every line of the contract on every release of megatron-core.

Downloads the newest patch of each release to runs/contract/ (wheels for Python 3.12, which other
versions run as well), runs each in a process of its own, and writes docs/results/
contract-megatron.json and the list in docs/megatron.md. With arguments (0.19) only these releases
run, and the others keep their results. The exit status is 1 if a line does not hold.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from flce_dist.launch.about import about
from tests.contract.listed import PAGE, RESULTS, with_lines
from tests.processes import ROOT

RELEASES = ("0.14", "0.15", "0.16", "0.17", "0.18", "0.19")


def unpacked(release: str) -> Path:
    """Return a folder with the newest patch of a release of megatron-core."""
    folder = ROOT / "runs" / "contract" / release
    if not folder.exists():
        options = "-q --no-deps --only-binary=:all: --python-version=3.12 --ignore-requires-python"
        command = [sys.executable, "-m", "pip", "install", *options.split(), f"--target={folder}"]
        subprocess.run([*command, f"megatron-core=={release}.*"], check=True)
    return folder


def run(release: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes.json"
        paths = f"{unpacked(release)}{os.pathsep}{ROOT}"
        settings = {"PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-m", "tests.contract.run_version", str(path)]
        subprocess.run(command, env=os.environ | settings, cwd=ROOT, check=True)
        print(f"megatron-core {release} is done", file=sys.stderr, flush=True)
        return json.loads(path.read_text())


def as_text(result: dict[str, Any]) -> str:
    """One line of JSON for each line of the contract and version."""
    head = json.dumps({name: x for name, x in result.items() if name != "lines"}, indent=1)[:-2]
    parts = []
    for title, versions in result["lines"].items():
        rows = (f"   {json.dumps(name)}: {json.dumps(found)}" for name, found in versions.items())
        parts.append(f"  {json.dumps(title)}: {{\n" + ",\n".join(rows) + "\n  }")
    return head + ',\n "lines": {\n' + ",\n".join(parts) + "\n }\n}\n"


def main(releases: Sequence[str]) -> int:
    """Return 1 if a line does not hold in one of the releases that ran, else 0."""
    unknown = set(releases) - {*RELEASES}
    if unknown:
        sys.exit(f"error: {', '.join(sorted(unknown))} is none of {', '.join(RELEASES)}")
    found = about(torch.device("cpu"))
    commit = found.pop("commit")
    for other in ("megatron-core", "cuda", "nccl"):
        del found[other]
    result: dict[str, Any] = {"command": "make contract", **found, "commits": {}, "lines": {}}
    if releases != RELEASES:
        kept = json.loads(RESULTS.read_text())
        result.update(commits=kept["commits"], lines=kept["lines"])
    with ThreadPoolExecutor(2) as two_at_a_time:
        outcomes = list(two_at_a_time.map(run, releases))
    for one in outcomes:
        version = one["megatron-core"]
        result["commits"][version] = commit
        for title, settings in one["lines"].items():
            result["lines"].setdefault(title, {})[version] = settings
    RESULTS.write_text(as_text(result))
    PAGE.write_text(with_lines(PAGE.read_text()))
    decided = [x for one in outcomes for line in one["lines"].values() for x in line.values()]
    return int(any(str(x).startswith("fail") for x in decided))


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or RELEASES))
