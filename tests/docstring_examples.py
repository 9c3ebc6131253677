"""The example in a docstring: the block behind ``Example::``."""

import inspect
import textwrap
from typing import Any


def example_of(function: Any) -> str:
    """Return the code of the one example."""
    before, *rest = (inspect.getdoc(function) or "").split("Example::\n\n")
    assert len(rest) == 1, f"{function.__name__} has {len(rest)} examples in {before[:60]!r}"
    block = []
    for line in rest[0].splitlines():
        if line and not line.startswith(" "):
            break
        block.append(line)
    return textwrap.dedent("\n".join(block)).strip() + "\n"


def run_example(function: Any, **names: Any) -> dict[str, Any]:
    """Run it with these names; return its variables."""
    exec(compile(example_of(function), f"example of {function.__name__}", "exec"), names)
    return names
