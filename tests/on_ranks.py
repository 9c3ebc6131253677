"""Tests that run on every one of some forked ranks: what a rank asserts, the test asserts."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any


def on_ranks(P: int | str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run ``test(group, ...)`` on P ranks of ``pools``; a name is that of an argument with P."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_all(pools: Any, **given: Any) -> None:
            size = given[P] if isinstance(P, str) else P
            pools[getattr(size, "size", size)].run(_rank, test.__module__, test.__name__, given)

        _, *arguments = inspect.signature(test).parameters.values()
        pools = inspect.Parameter("pools", inspect.Parameter.KEYWORD_ONLY)
        vars(on_all)["__signature__"] = inspect.Signature([*arguments, pools])
        return on_all

    return decorate


def _rank(group: Any, module: str, name: str, given: dict[str, Any]) -> None:
    getattr(sys.modules[module], name).__wrapped__(group, **given)
