"""Names in modules of other libraries that stand for ours, until they are restored."""

from typing import Any


class StandIns:
    """What was put in the place of others' functions and classes."""

    def __init__(self) -> None:
        self._theirs: list[tuple[Any, str, Any]] = []  # module, name, and what it stood for

    def put(self, module: Any, name: str, ours: Any) -> None:
        """Let the name stand for ours, if it does not yet."""
        theirs = getattr(module, name)
        if theirs is not ours:
            self._theirs.append((module, name, theirs))
            setattr(module, name, ours)

    def restore(self) -> None:
        """Let all names stand for what they did."""
        while self._theirs:
            setattr(*self._theirs.pop())
