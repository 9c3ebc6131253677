"""The list in docs/megatron.md, made from docs/results/contract-megatron.json."""

import json
import re
from itertools import groupby
from typing import Any

from tests.processes import ROOT

RESULTS = ROOT / "docs" / "results" / "contract-megatron.json"
PAGE = ROOT / "docs" / "megatron.md"
MARKED = re.compile(r"(<!-- contract -->\n).*?(<!-- end of contract -->)", re.S)


def entry(settings: dict[str, Any]) -> str:
    """The settings in which a line holds, as "5/5", or "n/a"."""
    if all(str(found).startswith("n/a") for found in settings.values()):
        return "n/a"
    return f"{sum(isinstance(x, float) for x in settings.values())}/{len(settings)}"


def in_releases(entries: dict[str, str]) -> str:
    """Releases' entries, in their order, as "5/5" or "n/a to 0.16.1, then 5/5"."""
    runs = [(one, list(releases)) for one, releases in groupby(entries, entries.__getitem__)]
    earlier = [f"{one} to {releases[-1]}" for one, releases in runs[:-1]]
    return ", then ".join([*earlier, runs[-1][0]])


def lines_of(result: dict[str, Any]) -> str:
    """Return a list of the lines, with their largest errors, and where not all settings hold."""
    lines: dict[str, dict[str, dict[str, Any]]] = result["lines"]
    releases = next(iter(lines.values()))
    every = entry({setting: 0.0 for setting in next(iter(releases.values()))})
    text = f"{every} in each of {', '.join(releases)}, unless it says otherwise:\n\n"
    missing: dict[str, list[str]] = {}
    for title, by_version in lines.items():
        found = [x for settings in by_version.values() for x in settings.values()]
        worst = max((x for x in found if not isinstance(x, str)), default=0.0)
        for reason in {x.removeprefix("n/a: ") for x in found if str(x).startswith("n/a")}:
            missing.setdefault(reason, []).append(title)
        entries = {release: entry(settings) for release, settings in by_version.items()}
        held = in_releases(entries)
        text += f"* {title} ({f'{worst:.1g}' if worst else 'equal'}"
        text += ")\n" if held == every else f"; {held})\n"
    reasons = [f"`{reason}`" for reason in missing]
    return f"{text}\nn/a marks what a version lacks: {'; '.join(reasons)}.\n"


def with_lines(page: str) -> str:
    """Return the page with the lines of the result file between its marks."""
    text = lines_of(json.loads(RESULTS.read_text()))
    found, count = MARKED.subn(lambda match: f"{match[1]}{text}{match[2]}", page)
    assert count == 1, "docs/megatron.md must have one contract"
    return found
