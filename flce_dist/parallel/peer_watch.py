"""Ends this process when a stream has waited too long for a peer, as NCCL's watchdog would.

A stream's wait for a flag has no limit of its own. So the GPU says in two cells of host memory that
it waits, and that it has passed a wait; both are written by the memory operations that hold the
wait, in a graph's replay too. A thread reads them once a second. It calls CUDA only for its message
when it ends the process, so it disturbs neither calls nor captures; the cost is three 32-bit writes
for each wait.
"""

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

from torch import Tensor

_POLL_S = 1.0


class Wait:
    """A place in the protocol where a stream waits: a cell that it does, a cell that it passed."""

    WAITS, PASSED = 0, 1

    def __init__(self, cells: Tensor, limit_s: float, describe: Callable[[], tuple[str, str]]):
        self._memory, self._limit_s, self._describe = cells, limit_s, describe
        # Not by tensor operations: they let go of the GIL, and a daemon thread that takes it again
        # while Python ends must have no C++ below it.
        self._cells = (ctypes.c_int32 * 2).from_address(cells.data_ptr())
        self._since: float | None = None

    def address(self, cell: int) -> int:
        return ctypes.addressof(self._cells) + 4 * cell

    def overdue(self, now: float) -> str | None:
        """Return who has waited for what if that has lasted longer than the limit, else None."""
        waits, passed = self._cells
        if passed or not waits or self._since is None:
            # What the GPU writes at this moment may be lost: it tells of what was before ``now``.
            self._cells[self.PASSED] = 0
            self._since = now
        elif now - self._since > self._limit_s:
            who, what = self._describe()
            return f"{who} has waited {now - self._since:.0f} s for {what}"
        return None


_watched: weakref.WeakSet[Wait] = weakref.WeakSet()
_lock = threading.Lock()


def watch(wait: Wait) -> None:
    """Look after a wait as long as somebody holds it."""
    with _lock:
        if not any(thread.name == __name__ for thread in threading.enumerate()):
            threading.Thread(target=_look_on, name=__name__, daemon=True).start()
        _watched.add(wait)


def _look_on() -> None:
    while True:
        time.sleep(_POLL_S)
        with _lock:
            waits = list(_watched)
        for wait in waits:
            said = wait.overdue(time.monotonic())
            if said is not None:
                print(f"flce_dist: {said}: this process ends", file=sys.stderr, flush=True)
                os.abort()
