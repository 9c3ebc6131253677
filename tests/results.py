"""Measure what README and docs show, and write their tables from the result files.

    python -m tests.results measure "one GPU" --out docs/results    # the same again: goes on
    python -m tests.results tables

docs/results.yaml says which program measures each file on which machine, and what each table shows.
A machine with several GPUs measures files of one GPU side by side.
A table stands behind a line ``<!-- table: its name -->``. Where a page says ``commit 1234567`` and
then links to a file of docs/results, the commit is the file's.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import yaml

ROOT = Path(__file__).parent.parent
FILES = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
USUAL = {"impl": "triton", "mode": "forward_backward", "max_logits_bytes": None, "filter_eps": None}
TABLE = re.compile(r"(?<=^<!-- table: )(.*?)( -->\n\n)((?:\|.*\n)*)", re.M)
COMMIT = re.compile(
    r"(?<=ommit[ \n])[0-9a-f]{7}(?=,?\s\(?\[[^\]]+\]\((?:docs/)?results/([\w-]+)\.json\))"
)


@cache
def spec() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docs" / "results.yaml").read_text())


@cache
def result(name: str) -> dict[str, Any]:
    return json.loads((FILES / f"{name}.json").read_text())


def record(where: dict[str, Any]) -> dict[str, Any]:
    """Return the only record of ``where["file"]`` that has these values; absent is None."""
    where = dict(where)
    records = result(where.pop("file"))["records"]
    found = [r for r in records if all((r.get(k) or None) == (x or None) for k, x in where.items())]
    if len(found) != 1:
        raise ValueError(f"{where} must be one record, got {len(found)}")
    return found[0]


def cell(text: str, of: dict[str, Any]) -> str:
    """Return the format with a record's values; nothing if one of them is None."""
    names = re.findall(r"\{(\w+)", text)
    if any(of.get(name) is None for name in names):
        return ""
    return re.sub(r"e([+-])0(?=\d)", lambda sign: "e" + sign[1].strip("+"), text.format_map(of))


def table(name: str) -> str:
    """Return a table as Markdown. Columns, then rows, say which record, and may say how."""
    of = spec()["tables"][name]
    rows = [[of.get("head", ""), *of["columns"]]]
    for label, row in of["rows"].items():
        cells = []
        for column in of["columns"].values():
            column = {"cell": column} if isinstance(column, str) else column
            where = {**USUAL, "file": of.get("file"), **of.get("where", {}), **column, **row}
            text = where.pop("cell", of.get("cell"))
            cells.append(cell(text, record(where)))
        rows.append([str(label), *cells])
    lines = [re.sub(" +", " ", f"| {' | '.join(row)} |") for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "".join(f"{line}\n" for line in lines)


def written(text: str) -> str:
    """Return a page with its tables and commits as the files have them."""
    text = TABLE.sub(lambda found: found[1] + found[2] + table(found[1]), text)
    return COMMIT.sub(lambda found: result(found[1]).get("about", {}).get("commit", found[0]), text)


def commands(machine: str, out: Path) -> Iterator[list[str]]:
    """Return the command that measures each file of a machine."""
    of = spec()["machines"][machine]
    for name, arguments in of["files"].items():
        program, *rest = arguments.split()
        file = ["--output", f"{out / name}.json"] if program == "verify" else ["--out", out / name]
        run = [*of["start"].split(), "-m", f"flce_dist.launch.{program}", *rest, *map(str, file)]
        yield [sys.executable, *run[1:]] if run[0] == "python" else run


def measure(command: list[str], gpus: "SimpleQueue[str]") -> int:
    """Run a command on one of these GPUs, which no other command then uses."""
    gpu = gpus.get()
    try:
        return subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu}).returncode
    finally:
        gpus.put(gpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    of = parser.add_subparsers(dest="what", required=True)
    of_machine = of.add_parser("measure")
    of_machine.add_argument("machine", choices=list(spec()["machines"]))
    of_machine.add_argument("--out", type=Path, required=True)
    of.add_parser("tables")
    settings = parser.parse_args()
    if settings.what == "measure":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or range(torch.cuda.device_count())
        every = visible.split(",") if isinstance(visible, str) else list(map(str, visible))
        is_of_one = spec()["machines"][settings.machine]["start"] == "python"
        gpus: SimpleQueue[str] = SimpleQueue()
        for gpu in every if is_of_one and every else [",".join(every)]:
            gpus.put(gpu)
        with ThreadPoolExecutor(max(1, gpus.qsize())) as pool:
            run = partial(measure, gpus=gpus)
            return max(pool.map(run, commands(settings.machine, settings.out)))
    for page in PAGES:
        page.write_text(written(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
