"""List the programs of this folder, each with the first line of its docstring.

    python -m flce_dist.launch

Files are read and not imported, so packages that a program needs may be missing.
"""

import ast
import sys
from pathlib import Path

from flce_dist.launch.program import HERE, RunError, run_program
from flce_dist.launch.read import read_bytes

FOLDER = Path(__file__).parent
STARTS = 'if __name__ == "__main__":'


def main() -> int:
    """Print the list; raise ``RunError`` for arguments, which no program would get."""
    arguments = sys.argv[1:]
    if arguments not in ([], ["-h"], ["--help"]):
        raise RunError(
            f"a program is started by its own name, such as python -m {HERE}train; "
            f"python -m {HERE[:-1]} takes no arguments, got {' '.join(arguments)}"
        )
    print(f"usage: python -m {HERE}PROGRAM --help\n")
    for name, description in programs().items():
        print(f"  {name:12} {description}")
    return 0


def programs() -> dict[str, str]:
    """Return what each program does, by its name."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        text = read_bytes(path).decode()
        if STARTS in text.splitlines() and path.parent != FOLDER:
            name = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
            docstring = ast.get_docstring(ast.parse(text)) or ""
            found[name.removesuffix(".__main__")] = docstring.partition("\n")[0]
    return found


if __name__ == "__main__":
    run_program(main)
