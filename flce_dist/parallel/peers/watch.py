"""Ends this process when a stream has waited too long for a peer, as NCCL's watchdog does.

A stream's wait for a flag has no timeout. So memory operations around it, in a graph's replay too,
write two words of pinned host memory, which a thread reads once a second. It calls no CUDA, so it
disturbs neither calls nor captures.
"""

import ctypes
import os
import sys
import threading
import time
import weakref

from torch import Tensor

_POLL_S = 1.0


class Wait:
    """A place in the protocol where a stream waits, with two int32 words of host memory."""

    WAITS = 0  # is 1 while the stream waits; becomes 1 whenever it has passed
    PASSED = 1

    def __init__(self, words: Tensor, limit_s: float, who: str, awaited: str):
        self._memory = words
        self._limit_s = limit_s
        self._who = who
        self._awaited = awaited
        # Not read as a tensor: tensor operations release the GIL, and a daemon thread that acquires
        # it again while Python shuts down must not be inside C++.
        self._words = (ctypes.c_int32 * 2).from_address(words.data_ptr())
        self._since: float | None = None

    def address(self, word: int) -> int:
        return ctypes.addressof(self._words) + 4 * word

    def overdue(self, now: float) -> str | None:
        """Return who waits for what if the wait has exceeded the limit at ``now``, else None."""
        waits, passed = self._words
        if passed or not waits or self._since is None:
            # This may erase a 1 that the GPU writes just now, which is about time before ``now``.
            self._words[self.PASSED] = 0
            self._since = now
        elif now - self._since > self._limit_s:
            return f"{self._who} has waited {now - self._since:.0f} s for {self._awaited}"
        return None


_watched: weakref.WeakSet[Wait] = weakref.WeakSet()
_lock = threading.Lock()


def watch(wait: Wait) -> None:
    """Check a wait once a second until it is garbage-collected."""
    with _lock:
        if not any(thread.name == __name__ for thread in threading.enumerate()):
            threading.Thread(target=_poll, name=__name__, daemon=True).start()
        _watched.add(wait)


def _poll() -> None:
    while True:
        time.sleep(_POLL_S)
        with _lock:
            waits = list(_watched)
        for wait in waits:
            message = wait.overdue(time.monotonic())
            if message is not None:
                print(f"flce_dist: {message}; this process ends", file=sys.stderr, flush=True)
                os.abort()
