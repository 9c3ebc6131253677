"""Private names of torch: what each is for, and what happens in a torch that no longer has it.

No other file of the library uses one. A missing one costs only what it is for: they are looked up
when they are needed, or have a default.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

c10d: Any = dist.distributed_c10d
_F = TypeVar("_F", bound=Callable[..., Any])


def _needed(owner: Any, name: str, use: str) -> Any:
    """Return ``owner.name``; without it this ``use`` is not supported."""
    attribute = getattr(owner, name, None)
    if attribute is None:
        raise NotImplementedError(f"{use} needs {name}, which torch {torch.__version__} lacks")
    return attribute


# --- one call


def keeps_graph() -> bool:
    """Whether the backward that runs may run again, as ``retain_graph`` says.

    Without it: yes, and gradients that in_forward has saved are copied before they are returned.
    """
    return getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)()


def is_wanted(node: Any) -> bool:
    """Whether the backward that runs computes the gradient that goes to this node of the graph.

    Without it: yes. With accumulate_dweight a backward for hidden alone then adds dweight, too.
    """
    try:
        return _is_executed(node)
    except RuntimeError:  # torch answers so about a leaf that torch.autograd.grad was asked for
        return True


def is_returned(node: Any) -> bool:
    """Whether ``torch.autograd.grad``, which runs, returns the gradient that goes to this node.

    Or what nodes of one input, such as casts and views, make of that. Not one of several inputs:
    their gradients are not in main_grad.

    Without it: no. With accumulate_dweight it then returns None, or zeros that share one element.
    """
    try:
        while _is_executed(node):
            behind = [before for before, _ in node.next_functions if before is not None]
            if behind and not any(map(is_wanted, behind)):
                return True  # it runs for its own sake
            if len(behind) != 1:
                return False
            node = behind[0]
    except RuntimeError:  # as above
        return True
    return False


def _is_executed(node: Any) -> bool:
    return getattr(torch._C, "_will_engine_execute_node", lambda node: True)(node)


transforms: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)
"""Whether a transform of torch.func is active. Without it: no, and torch's own error comes."""

FakeTensor: Any = getattr(getattr(torch, "_subclasses", None), "FakeTensor", ())
"""The class of tensors of FakeTensorMode. Without it: of none, and torch's own error comes."""

recorder: Callable[[], Any] = partial(
    getattr(torch._C, "_get_dispatch_mode", lambda key: None),
    getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "PROXY", None),
)
"""The mode of make_fx, also inside torch.func.linearize, or None. Without it: None, and torch's own
error comes."""

is_jit_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", lambda: False)
"""Whether torch.jit.trace is active. Without it: no, and torch's own error comes."""


def is_batched(x: Tensor) -> bool:
    """Whether is_grads_batched made this gradient. Without it: no, and torch's own error comes."""
    return getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: False)(x)


def backward_id() -> int:
    """Return the id of the backward that runs. Without it: an error."""
    return _needed(torch._C, "_current_graph_task_id", "overwrite_main_grad")()


def assert_soon(condition: Tensor, message: str) -> None:
    """Assert a bool tensor without waiting for its device. Without it: the host waits."""
    check = getattr(torch, "_assert_async", None)
    if check is not None:
        check(condition, message)
    elif not condition:
        raise RuntimeError(message)


def group_named(name: str) -> dist.ProcessGroup:
    """Return the group of this name, by which compiled code refers to it. Without it: an error."""
    return _needed(c10d, "_resolve_process_group", "torch.compile with a tp_group")(name)


def hooks_of_all_modules() -> list[Any]:
    """Return the forward and backward hooks of all modules. Without a name: none of its kind."""
    names = "_global_forward_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"
    kinds = (getattr(torch.nn.modules.module, name, {}) for name in names)
    return [hook for hooks in kinds for hook in hooks.values()]


def keep_order(operator: Any) -> None:
    """Make compilers keep the order of calls of such operators (``torch._ops.OpOverload``).

    Without it: they keep it unless another takes less memory.
    """
    with suppress(ImportError, AttributeError):
        from torch._higher_order_ops import effects

        effects._register_effectful_op(operator, effects._EffectType.ORDERED)


def constant_in_graphs(function: _F) -> _F:
    """Let compiled code call the function once, while it is traced.

    As ``torch.compiler.assume_constant_result`` does, which imports Triton. Without it: the
    function is traced.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def outside_graphs(function: Any, name: str) -> Any:
    """Return the function, which under torch.compile runs between two graphs.

    With fullgraph=True the error says so, by the ``name`` that the user knows, and under
    torch.export another one. Without the break the function is traced, without the flag of exports
    the error is that of fullgraph=True.
    """
    if not torch.compiler.is_compiling():
        return function
    # Before torch 2.13 torch.compiler.is_exporting() is true under torch.compile, too.
    if getattr(torch.compiler, "_is_exporting_flag", False):
        raise NotImplementedError(
            f"{name} is not part of a graph of torch.export; export what returns the hidden "
            f"states, and call {name} on these"
        )
    reason = (
        f"{name} is not part of a graph of torch.compile; use fullgraph=False, with which the "
        "graph ends before it and another one begins after it"
    )
    getattr(torch._dynamo, "graph_break", lambda msg: None)(msg=reason)
    return torch.compiler.disable(function)


# --- DTensors


def async_tensors() -> tuple[type[Tensor], ...]:
    """Return the types of tensors whose collective may be in flight. Without one: none."""
    try:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor
    except ImportError:
        return ()
    return (AsyncCollectiveTensor,)


def fsdp_sharding(x: Tensor) -> tuple[Any, float] | None:
    """Return the mesh over which FSDP2 has sharded a parameter, and what sums are divided by.

    None for another tensor, and under torch.compile. Without the names below: None for each.
    """
    if torch.compiler.is_compiling():
        return None
    with suppress(ImportError, AttributeError):
        from torch.distributed._composable_state import _module_state_mapping as states

        for state in list(states.values()):
            groups = getattr(state(), "_fsdp_param_groups", None)  # one in older releases
            for group in filter(None, groups or [getattr(state(), "_fsdp_param_group", None)]):
                for parameter in group.fsdp_params:
                    if parameter.sharded_param is x:
                        mesh = parameter.mesh_info.mesh  # of data ranks, maybe replicas first
                        return mesh, group.gradient_divide_factor or mesh.size()
    return None


def place_of(x: Any) -> tuple[slice, ...]:
    """Return which slices of a DTensor its local tensor is. Without it: an error."""
    (chunk,) = _needed(x, "__create_chunk_list__", "a state dict of DTensors")()
    ranges = zip(chunk.offsets, chunk.sizes, strict=True)
    return tuple(slice(start, start + size) for start, size in ranges)


# --- streams, and memory that GPUs share


def current_stream(device: torch.device) -> int:
    """Return CUDA's handle of a device's current stream. Without it: by way of torch's object."""
    of_index = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return of_index(device.index) if of_index else torch.cuda.current_stream(device).cuda_stream


def shares_memory() -> bool:
    """Whether this torch has what ``shared_memory`` and ``store_of`` need.

    Without it: no copies between GPUs, tokens travel by collectives.
    """
    try:
        from torch.distributed import _symmetric_memory as memory
    except ImportError:
        return False
    has_memory = all(hasattr(memory, name) for name in ("empty", "rendezvous"))
    return has_memory and hasattr(c10d, "_get_process_group_store")


def shared_memory(nbytes: int, device: torch.device, group: Any) -> tuple[Tensor, Any]:
    """Allocate bytes on each rank of the group of this name; return them and how to reach all."""
    from torch.distributed import _symmetric_memory as memory

    mine = memory.empty(nbytes, dtype=torch.uint8, device=device)
    return mine, memory.rendezvous(mine, group)


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store at which the ranks of a group met."""
    return c10d._get_process_group_store(group)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of a group's collectives. Without it: torch's default, 30 minutes."""
    backend = getattr(group, "_get_backend", lambda device: None)(device)
    return getattr(getattr(backend, "options", None), "_timeout", default_pg_timeout)


def default_store() -> dist.Store:
    """Return the store at which all ranks met. Without it: an error."""
    return _needed(c10d, "_get_default_store", "the order in which ranks fail")()


# --- simulated ranks


def forget_groups() -> None:
    """Forget the groups of the process that was forked. Without it: an error if there are any."""
    if hasattr(c10d, "_World") or dist.is_initialized():
        c10d._world = _needed(c10d, "_World", "a fork of a process with process groups")()
        c10d.GroupMember.WORLD = None


@contextmanager
def threaded_world(group: Any) -> Iterator[None]:
    """Threads that start inside have groups of class ``group`` of their own. Without it: an error.

    That is a subclass of ``threaded_group()``.
    """
    use = 'backend="threads", unlike backend="gloo",'
    threads = _needed(_threads(), "ThreadLocalWorld", use)
    reset = _needed(group, "reset", use)
    isolate = _needed(torch._C._distributed_c10d, "_set_thread_isolation_mode", use)
    isolate(True)
    world = c10d._world
    c10d._world = threads()
    try:
        yield
    finally:
        c10d._world = world
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
