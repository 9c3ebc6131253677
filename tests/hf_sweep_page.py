"""The list in docs/hugging_face.md, made from docs/results/hf-classes.json."""

import json
import re
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "hugging_face.md"
RESULTS = ROOT / "docs" / "results" / "hf-classes.json"
MARKED = re.compile(r"(<!-- classes -->\n).*?(<!-- end of classes -->)", re.S)
VERSIONS = ("transformers", "torch", "flce_dist")


def write(classes: dict[str, Any]) -> None:
    """Write the results of all classes, and the page's list of them."""
    found = {
        "command": "python -m tests.hf_sweep",
        "versions": {name: version(name) for name in VERSIONS},
        "classes": classes,
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(x)}" for name, x in classes.items()]
    head = json.dumps({name: x for name, x in found.items() if name != "classes"}, indent=1)
    RESULTS.write_text(f'{head[:-2]},\n "classes": {{\n' + ",\n".join(lines) + "\n }\n}\n")
    PAGE.write_text(with_lines(PAGE.read_text(), found))


def with_lines(page: str, found: dict[str, Any]) -> str:
    """Return the page with the list of these results."""
    text, count = MARKED.subn(lambda marks: marks[1] + lines_of(found) + marks[2], page)
    assert count == 1, f"{PAGE.name} must have one list of classes"
    return text


def lines_of(found: dict[str, Any]) -> str:
    classes = found["classes"]
    versions = found["versions"]
    by_result = {
        result: {name: x for name, x in classes.items() if x["result"] == result}
        for result in ("fused", "real logits", "refused", "not built", "WRONG")
    }
    tried = len(classes) - len(by_result["not built"])
    largest = max(x["error"] for x in classes.values() if "error" in x)
    lines = [
        f"transformers {versions['transformers']}, torch {versions['torch']}: {tried} of "
        f"{len(classes)} causal, image- and audio-to-text classes could be built with a tiny "
        f"config. In a step of training, errors of loss and gradients up to {largest:.0e}:",
        "",
        f"* fused: {len(by_result['fused'])}",
    ]
    for result in ("real logits", "refused", "WRONG"):
        if by_result[result]:
            lines.append(f"* {result}: {len(by_result[result])}")
            lines += [f"  * {name}: {plain(x['why'])}" for name, x in by_result[result].items()]
    lines += [
        "",
        f"[Each class](results/{RESULTS.name}), and why the other "
        f"{len(by_result['not built'])} were not built. `python -m tests.hf_sweep` runs them.",
    ]
    return "".join(f"{wrapped(line)}\n" for line in lines)


def wrapped(line: str) -> str:
    indent = " " * (line.index("*") + 2) if line.lstrip().startswith("*") else ""
    return textwrap.fill(line, 100, subsequent_indent=indent, break_long_words=False)


def plain(why: str) -> str:
    """Return a reason without the type of its error, and the printed form of modules."""
    return (
        re.sub(r"^\w+Error: ", "", why)
        .split("(in_features")[0]
        .replace("<function ", "")
        .rstrip(">")
        .replace("__getitem__", "a mask")
        .replace("__setitem__", "a change in place")
    )
