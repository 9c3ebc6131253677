"""What is decided once for the same arguments: options that are checked, calls that are planned."""

import functools
import threading
import weakref
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist

from flce_dist.arguments.check_options import check_options
from flce_dist.arguments.options import LossOptions
from flce_dist.arguments.passed import PLAIN, Arguments
from flce_dist.core.call import Call, Needs


def checked_options(**keywords: Any) -> LossOptions:
    """Return the options of these keywords, checked once for the same keywords."""
    if not torch.compiler.is_compiling():
        ends = keywords.get("vocab_range")  # into which typed=True does not look
        types = map(type, ends) if isinstance(ends, tuple) else ()
        try:
            return _checked_once(*types, **keywords)
        except TypeError:  # a value is not hashable
            pass
    return check_options(LossOptions(**keywords))


@functools.lru_cache(typed=True)
def _checked_once(*_: type, **keywords: Any) -> LossOptions:
    return check_options(LossOptions(**keywords))


class RecentCalls(OrderedDict[Any, Call]):
    """Calls of which all facts were checked and planned before, by these facts.

    The least recently used one makes room. Groups are held weakly. Threads may share it.
    """

    most = 256

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def recall(self, facts: Any) -> Call | None:
        with self._lock:
            call = self.get(facts)
            if call is not None:
                self.move_to_end(facts)
            return call

    def remember(self, facts: Any, call: Call) -> None:
        with self._lock:
            self[facts] = call
            if len(self) > self.most:
                self.popitem(last=False)


calls = RecentCalls()


def facts_of(arguments: Arguments, needs: Needs, *others: Any) -> Any:
    """Return all that a ``Call`` depends on, hashable; None if only checks can tell."""
    group = arguments.tp_group
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return None
    weak = None if group is None else weakref.ref(group)
    facts: list[Any] = [arguments.options, *needs, *others, weak]
    for x in arguments[:6]:
        if x is None:
            facts.append(None)
            continue
        if x.__class__ not in PLAIN or x.is_nested:
            return None
        facts.append((x.shape, x.dtype, x.device, x.layout, x.requires_grad))
    return tuple(facts)
