"""Process groups: their names, stores and timeouts, and groups of threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from flce_dist.torch_private.lookup import needed

_c10d: Any = dist.distributed_c10d


def group_named(name: str) -> dist.ProcessGroup:
    """Return the group of this name, by which compiled code refers to it. Without it: an error."""
    return needed(_c10d, "_resolve_process_group", "torch.compile with a tp_group")(name)


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store at which the ranks of a group met."""
    return _c10d._get_process_group_store(group)


def default_store() -> dist.Store:
    """Return the store at which all ranks met. Without it: an error."""
    return needed(_c10d, "_get_default_store", "the order in which ranks fail")()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of a group's collectives. Without it: torch's default, 30 minutes."""
    backend = getattr(group, "_get_backend", lambda device: None)(device)
    return getattr(getattr(backend, "options", None), "_timeout", default_pg_timeout)


def forget_groups() -> None:
    """Forget the groups of the process that was forked. Without it: an error if there are any."""
    if hasattr(_c10d, "_World") or dist.is_initialized():
        _c10d._world = needed(_c10d, "_World", "a fork of a process with process groups")()
        _c10d.GroupMember.WORLD = None


@contextmanager
def threaded_world(group: Any) -> Iterator[None]:
    """Threads that start inside have groups of class ``group`` of their own. Without it: an error.

    That is a subclass of ``threaded_group()``.
    """
    use = 'backend="threads", unlike backend="gloo",'
    threads = needed(_threads(), "ThreadLocalWorld", use)
    reset = needed(group, "reset", use)
    isolate = needed(torch._C._distributed_c10d, "_set_thread_isolation_mode", use)
    isolate(True)
    world = _c10d._world
    _c10d._world = threads()
    try:
        yield
    finally:
        _c10d._world = world
        reset()
        isolate(False)


def threaded_group() -> Any:
    """Return the class of groups of threads. Without it: one that ``threaded_world`` refuses."""
    return getattr(_threads(), "ProcessLocalGroup", dist.ProcessGroup)


def _threads() -> Any:
    try:
        from torch.testing._internal.distributed import multi_threaded_pg
    except ImportError:
        return None
    return multi_threaded_pg
