"""Measure what README and docs show, and write their tables and figures from the result files.

    python -m tests.results measure "one GPU" --out runs/results    # the same again: goes on
    python -m tests.results measure "two GPUs" --text corpus.txt --out runs/results
    python -m tests.results show --out runs/results

docs/results.yaml has the command that measures each file on which machine, and what is shown of it.
Files are measured side by side where there are GPUs for it; those of ``alone``, the host's times,
one by one. What trains on a text is measured if it gets one.
A table stands behind a line ``<!-- table: its name -->``, ``<!--name-->`` behind a range, or behind
the largest number of one. Where a page says ``commit 1234567`` and then links to a file of
docs/results, the commit is the file's.
"""

import argparse
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, TextIO, get_args

import torch
import yaml

from flce_dist.arguments.options import ScheduleName
from flce_dist.launch.about import about
from flce_dist.launch.verify.__main__ import DTYPES
from flce_dist.launch.verify.report import share_of_budget
from flce_dist.launch.write import write_json
from flce_dist.launch.yaml_config import ConfigError
from flce_dist.testing import ErrorBudget

ROOT = Path(__file__).parent.parent
FILES = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
USUAL = {"impl": "triton", "mode": "forward_backward", "max_logits_bytes": None, "filter_eps": None}
TABLE = re.compile(r"(?<=^<!-- table: )(.*?)( -->\n\n)((?:\|.*\n)*)", re.M)
RANGE = re.compile(r"([\d.e-]+)(\s+to\s+)?([\d.e-]*)<!--([\w-]+)-->")
COMMIT = re.compile(
    r"(?<=ommit[ \n])[0-9a-f]{7,}(?=,?\s+\(?\[[^\]]+\]\((?:docs/)?results/([\w-]+)\.json\))"
)


@cache
def spec() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docs" / "results.yaml").read_text())


@cache
def result(name: str) -> dict[str, Any]:
    return json.loads((FILES / f"{name}.json").read_text())


def matching(file: str, **where: Any) -> list[dict[str, Any]]:
    """Return the records of a file that have these values; absent is None."""
    records = result(file)["records"]
    return [r for r in records if all((r.get(k) or None) == (x or None) for k, x in where.items())]


def record(where: dict[str, Any]) -> dict[str, Any]:
    found = matching(**where)
    if len(found) != 1:
        raise ValueError(f"{where} must be one record, got {len(found)}")
    return found[0]


def cell(form: str, values: dict[str, Any]) -> str:
    """Return the format ``form`` with a record's values; nothing if one of them is None.

    An exponent is as short as it may be: 1e-5, not 1e-05.
    """
    names = re.findall(r"\{(\w+)", form)
    if any(values.get(name) is None for name in names):
        return ""
    text = form.format_map(values)
    return re.sub(r"e([+-])0(?=\d)", lambda sign: "e" + sign[1].strip("+"), text)


def table(name: str) -> str:
    """Return a table as Markdown. Columns, then rows, say which record, and may say how."""
    layout = spec()["tables"][name]
    of_all = {**USUAL, "file": layout.get("file"), **layout.get("where", {})}
    rows = [[layout.get("head", ""), *layout["columns"]]]
    for label, row in layout["rows"].items():
        cells = []
        for column in layout["columns"].values():
            column = {"cell": column} if isinstance(column, str) else column
            where = {**of_all, **column, **row}
            form = where.pop("cell", layout.get("cell"))
            cells.append(cell(form, record(where)))
        rows.append([str(label), *cells])
    lines = [re.sub(" +", " ", f"| {' | '.join(row)} |") for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "".join(f"{line}\n" for line in lines)


def extremes(name: str) -> list[str]:
    """Return the least and the largest number of a range, or their sum twice."""
    wanted = spec()["ranges"][name]
    factor = wanted.get("times", 1)
    numbers = list[float]()
    for file, where in itertools.product(wanted["files"], wanted["where"]):
        where = {**USUAL, "file": file, **where}
        for x in matching(**where):
            size = {name: x.get(name) for name in "THV"}
            divisors = record({**where, **wanted["per"], **size}) if "per" in wanted else {}
            numbers += [factor * x[key] / divisors.get(key, 1) for key in wanted["values"]]
    if wanted.get("sum"):
        numbers = [sum(numbers)]
    return [cell(wanted["cell"], {"x": x}) for x in (min(numbers), max(numbers))]


def ranged(found: re.Match[str]) -> str:
    """Return a match of ``RANGE`` with the numbers that the files have."""
    least, largest = extremes(found[4])
    return f"{least + found[2] if found[2] else ''}{largest}<!--{found[4]}-->"


def written(text: str) -> str:
    """Return a page with its tables, ranges and commits as the files have them."""
    text = TABLE.sub(lambda found: found[1] + found[2] + table(found[1]), text)
    text = RANGE.sub(ranged, text)
    return COMMIT.sub(lambda found: result(found[1]).get("about", {}).get("commit", found[0]), text)


def commands(machine: str, out: Path) -> dict[str, list[list[str]]]:
    """Return the commands that measure each file of a machine; of verify's, one for each part."""
    plan = spec()["machines"][machine]
    start = [sys.executable]
    if plan["gpus"] > 1:
        start = ["torchrun", "--standalone", "--nproc-per-node", str(plan["gpus"])]
    found = {}
    for name, arguments in plan["files"].items():
        program, *rest = arguments.split()
        parts = [["--out", f"{out / name}"]]
        if program == "verify":
            parts = [
                ["--dtypes", dtype, "--schedules", schedule, "--output", f"{out / name}-{i}.json"]
                for i, (dtype, schedule) in enumerate(
                    itertools.product(DTYPES, get_args(ScheduleName))
                )
            ]
        program = f"flce_dist.launch.{program}"
        found[name] = [[*start, "-m", program, *rest, *part] for part in parts]
    return found


def training_commands(machine: str, out: Path, text: Path | None) -> dict[str, list[str]]:
    """Return the commands that train and measure it, which start their ranks themselves.

    Those that need a text are left out without one, and named.
    """
    found = {}
    for name, arguments in spec()["machines"][machine].get("training", {}).items():
        if "{text}" in arguments and text is None:
            print(f"{name}: not measured, since it needs --text")
            continue
        program, *rest = (part.format(text=text) for part in arguments.split())
        output = "--out" if program == "train.heads" else "--out-dir"
        module = f"flce_dist.launch.{program}"
        found[name] = [sys.executable, "-m", module, *rest, output, f"{out / name}"]
    return found


def run(command: list[str], gpus: str, output: TextIO | None = None) -> int:
    """Run a command that sees these GPUs; return its exit status, above 0 also of a killed one."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
    return abs(subprocess.run(command, env=environment, stdout=output, stderr=output).returncode)


class Measuring:
    """Runs commands on groups of GPUs.

    What has succeeded once at this commit is not run again: ``out`` has a note of it.
    """

    def __init__(self, out: Path, groups: list[str]):
        self._out = out
        self._commit = str(about(torch.device("cpu"))["commit"])
        self._groups = groups
        self._free: SimpleQueue[str] = SimpleQueue()
        for gpus in groups:
            self._free.put(gpus)

    def run(self, name: str, command: list[str]) -> int:
        """Run the command that measures a file, on GPUs that no other then uses."""

        def alone() -> int:
            gpus = self._free.get()
            try:
                return run(command, gpus)
            finally:
                self._free.put(gpus)

        return self._once(name, alone)

    def verify(self, name: str, parts: list[list[str]]) -> int:
        """Run the parts at once, since they compile for longer than they compute; write the file.

        Returns the largest exit status.
        """
        files = [Path(part[-1]) for part in parts]

        def run_part(part: list[str], file: Path, gpus: str) -> int:
            def beside_others() -> int:
                file.unlink(missing_ok=True)  # of another commit
                with file.with_suffix(".log").open("w") as log:
                    return run(part, gpus, log)

            return self._once(file.stem, beside_others)

        with ThreadPoolExecutor(len(parts)) as pool:
            status = max(pool.map(run_part, parts, files, itertools.cycle(self._groups)))
        if all(file.exists() for file in files):
            found = [json.loads(file.read_text()) for file in files]
            write_json(self._out / f"{name}.json", closest(found))
        return status

    def _once(self, name: str, measure: Callable[[], int]) -> int:
        """Measure what has no note yet; return the exit status, and say one above 0."""
        note = self._out / f"{name}.done"
        if note.exists() and note.read_text() == self._commit:
            print(f"{name}: measured before")
            return 0
        status = measure()
        if status == 0:
            note.write_text(self._commit)
        else:
            print(f"{name}: exit status {status}")
        return status


def groups_of_gpus(size: int) -> list[str]:
    """Cut the visible GPUs into groups of so many, as CUDA_VISIBLE_DEVICES names them.

    Some may be left over. The program ends if there are fewer than ``size``.
    """
    count = torch.cuda.device_count()
    if count < size:
        sys.exit(f"error: {size} {'GPU' if size == 1 else 'GPUs'} needed, found {count}")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else list(map(str, range(count)))
    whole = count - count % size
    return [",".join(gpus[i : i + size]) for i in range(0, whole, size)]


def closest(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the file of ``verify``'s parts: of each dtype, and each result, the error that is
    closest to its budget, with the case in which it was found.
    """
    passed = all([part.pop("passed") for part in parts])
    records = [record for part in parts for record in part.pop("records")]
    for part in parts:
        del part["seconds"]
        if part != parts[0]:
            raise ValueError(f"parts must be of one commit and machine, got {parts[0]} and {part}")
    rows: dict[str, dict[str, Any]] = {}
    shares: dict[tuple[str, str], float] = {}
    for x in records:
        dtype = x["dtype"]
        variant = x["case"]["variant"]
        row = rows.setdefault(dtype, {"dtype": dtype, "cases": 0})
        row["cases"] += 1
        how = f"{x['case']['schedule']}, T={x['shape']['T']}"
        case = f"{variant['name']} ({variant['reduction']}), {how}"
        for name, check in x["checks"].items():
            error = check["error"]
            budget = check["budget"]
            # A file has null where the error was NaN.
            share = share_of_budget(ErrorBudget(math.nan if error is None else error, budget))
            if share >= shares.get((dtype, name), 0.0):
                shares[dtype, name] = share
                row |= {name: error, f"{name}_budget": budget, f"{name}_case": case}
    described = {
        **parts[0],
        "passed": passed,
        "what": "errors closest to their budgets, relative RMS",
    }
    return {"about": described, "records": list(rows.values())}


def measure_all(machine: str, out: Path, text: Path | None) -> int:
    """Measure what is alone and what trains, then side by side, each on GPUs of its own; verify."""
    plan = spec()["machines"][machine]
    todo = commands(machine, out)
    groups = groups_of_gpus(plan["gpus"])
    out.mkdir(parents=True, exist_ok=True)
    measuring = Measuring(out, groups)
    checks = {name: todo.pop(name) for name in list(todo) if name.startswith("verify")}
    status = [measuring.run(name, *todo.pop(name)) for name in plan["alone"]]
    for name, command in training_commands(machine, out, text).items():
        status.append(measuring.run(name, command))
        for compared in (out / name).glob("compare.*"):  # of a single run
            shutil.copy(compared, out / f"{name}{compared.suffix}")
    with ThreadPoolExecutor(len(groups)) as pool:
        status += pool.map(lambda name: measuring.run(name, *todo[name]), todo)
    status += [measuring.verify(name, parts) for name, parts in checks.items()]
    return max(status, default=0)


def show(new: Path) -> None:
    """Take these result files into docs/results, and write what pages and figures show of them."""
    for machine in spec()["machines"].values():
        for name in [*machine["files"], *machine.get("training", {})]:
            for file in (new / f"{name}.json", new / f"{name}.png"):
                if file.exists():
                    shutil.copy(file, FILES)
    for page in PAGES:
        page.write_text(written(page.read_text()))
    for names in spec()["figures"]:
        files = [new / f"{name}.json" for name in names]
        if any(file.exists() for file in files):
            redraw([file if file.exists() else FILES / file.name for file in files])


def redraw(files: list[Path]) -> None:
    """Draw what these files show; figures that docs/results has are replaced."""
    from flce_dist.launch.plot.__main__ import draw

    with TemporaryDirectory() as folder:
        try:
            figures = draw(files, Path(folder))
        except ConfigError as error:
            print(f"not drawn: {error}")
            return
        for figure in figures:
            if (FILES / figure.name).exists():
                shutil.copy(figure, FILES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    programs = parser.add_subparsers(dest="what", required=True)
    measuring = programs.add_parser("measure")
    measuring.add_argument("machine", choices=list(spec()["machines"]))
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--text", type=Path, help="UTF-8, to train on")
    programs.add_parser("show").add_argument("--out", type=Path, required=True)
    settings = parser.parse_args()
    if settings.what == "measure":
        return measure_all(settings.machine, settings.out, settings.text)
    show(settings.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
