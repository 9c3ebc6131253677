"""DTensors as arguments.

The op and its collectives work on plain tensors. A DTensor argument is replaced by this rank's
local tensor if its placements are those that the op expects; otherwise it is refused. Through
``DTensor.to_local`` gradients get the mesh and placements of their operand. A parameter that FSDP2
has sharded is gathered from its data ranks, over which its gradient is averaged.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from flce_dist import torch_private
from flce_dist.arguments.check_tensors import check_group
from flce_dist.arguments.options import LossOptions
from flce_dist.arguments.passed import Arguments
from flce_dist.arguments.ways_out import IN_FORWARD_OF_FSDP
from flce_dist.parallel import collectives
from flce_dist.parallel.vocab import vocab_range

_OF_ROWS = (
    "pass the ranks that share its rows as tp_group, for example weight.device_mesh.get_group() if "
    "these ranks have the same tokens"
)
_OF_DATA_ROWS = (
    "pass the ranks that share its rows as data_group, for example weight.device_mesh.get_group()"
)
_OF_TOKENS = (
    "for tokens that are split over data ranks pass hidden.to_local(), labels.to_local() and "
    "weight.to_local(grad_placements=...) with Partial() over these ranks"
)
_OF_FSDP = (  # the ranks of whose mesh are no tp_group
    "FSDP2 has sharded it, also over ranks with other tokens: pass those of the same tokens as "
    f"tp_group, or {IN_FORWARD_OF_FSDP}"
)

_ASYNC = torch_private.async_tensors()


def localized(arguments: Arguments) -> Arguments:
    """Return the arguments with each DTensor replaced by its local tensor.

    Only global shapes and placements are checked, so either all ranks of ``tp_group`` raise or none
    does. Options have been checked before.
    """
    hidden, weight, labels, bias, token_weight, temperature, options, tp_group = arguments
    check_group(tp_group, options.sequence_parallel)
    if options.sequence_parallel and isinstance(hidden, DTensor):
        dim = _dimension(hidden.device_mesh, tp_group)
        if dim is not None and hidden.dim() > 2 and hidden.placements[dim] == Shard(1):
            options = replace(options, sequence_dim=1)
            arguments = arguments._replace(options=options)
    tokens = Shard(options.sequence_dim) if options.sequence_parallel else Replicate()
    rows = Replicate() if tp_group is None else Shard(0)
    of_rows = _OF_DATA_ROWS if options.data_parallel else _OF_ROWS
    group_name = options.group_name
    # With reduce_dhidden=False each rank returns a partial sum, and DTensor adds them up.
    dhidden = None if options.reduce_dhidden else Partial()
    of_tokens = (
        f"sequence_parallel is {options.sequence_parallel}, reduce_dhidden "
        f"{options.reduce_dhidden}; {_OF_TOKENS}"
    )
    weight, bias = (gathered(x, hidden, tp_group) for x in (weight, bias))
    return Arguments(
        local_of("hidden", hidden, tokens, tp_group, of_tokens, dhidden),
        local_of("weight", weight, rows, tp_group, of_rows, group_name=group_name),
        local_of("labels", labels, Replicate(), tp_group, _OF_TOKENS),
        local_of("bias", bias, rows, tp_group, of_rows, group_name=group_name),
        local_of("token_weight", token_weight, Replicate(), tp_group),
        local_of("temperature", temperature, Replicate(), tp_group),
        options if tp_group is None else _checked_wholes(arguments),
        tp_group,
    )


def _checked_wholes(arguments: Arguments) -> LossOptions:
    """Check global sizes, of which a wrong one might show on some ranks only.

    Returns options with the ``vocab_size`` and ``vocab_range`` of a DTensor weight.
    """
    hidden, weight, _, bias, *_, options, tp_group = arguments
    P = collectives.group_size(tp_group)
    rank = collectives.group_rank(tp_group)
    dim = options.sequence_dim
    if isinstance(hidden, DTensor) and options.sequence_parallel and hidden.shape[dim] % P:
        raise ValueError(
            f"hidden must have a multiple of {P} in its {'second' if dim else 'first'} dimension "
            f"under sequence_parallel=True, got {tuple(hidden.shape)}"
        )
    if not isinstance(weight, DTensor):
        return options
    V = weight.shape[0]
    vocab_size = options.vocab_size
    if isinstance(bias, DTensor) and bias.shape[0] != V:
        raise ValueError(f"bias must be [V] with V = {V} from weight, got {tuple(bias.shape)}")
    if options.vocab_range is not None:
        raise ValueError(
            "vocab_range must be None for a DTensor weight, whose placement determines the rows, "
            f"got {options.vocab_range}"
        )
    if vocab_size is not None and vocab_size > V:
        raise ValueError(f"vocab_size must be within [1, {V}] from weight, got {vocab_size}")
    return replace(options, vocab_size=vocab_size or V, vocab_range=vocab_range(V, rank, P))


def local_of(
    name: str,
    x: Any,
    expected: Placement,
    tp_group: dist.ProcessGroup | None,
    hint: str = "",
    gradient: Placement | None = None,
    group_name: str = "tp_group",
) -> Any:
    """Return the local tensor of ``x``; raise unless its placement over the group is ``expected``.

    Over other mesh dimensions it must be replicated. ``gradient`` is the placement of its gradient
    over the group; None for the placement of ``x``. ``group_name`` is the caller's.
    """
    check_holds_data(name, x)
    if isinstance(x, DTensor):
        mesh = x.device_mesh
        dim = _dimension(mesh, tp_group)
        anywhere = expected.is_replicate() and gradient is None
        fits = dim is not None or anywhere or collectives.group_size(tp_group) == 1
        for d, placement in enumerate(x.placements):
            wanted = expected if d == dim else Replicate()
            is_wanted = placement.__class__ is wanted.__class__ and placement == wanted
            fits &= mesh.size(d) == 1 or is_wanted
        if not fits or mesh.get_coordinate() is None:
            hint = _OF_FSDP if hint == _OF_ROWS and torch_private.fsdp_sharding(x) else hint
            where = "" if tp_group is None else f" over {group_name}'s ranks {ranks_of(tp_group)}"
            raise ValueError(
                f"{name} must be a plain tensor or a DTensor with {expected!r}{where} and "
                f"replicated over other ranks, got {x.placements} on {mesh}"
                + (f"; {hint}" if hint else "")
            )
        gradients = [Replicate() if p.is_partial() else p for p in x.placements]
        if gradient is not None and dim is not None:
            gradients[dim] = gradient
        x = x.to_local(grad_placements=gradients)
    return _Waited.apply(x) if isinstance(x, _ASYNC) else x


def check_holds_data(name: str, x: Any) -> None:
    """Raise if ``x`` is a FakeTensor outside compiled code.

    Beside real tensors its mode may let a result be memory that nothing has been written to.
    """
    if isinstance(x, torch_private.FakeTensor) and not torch.compiler.is_compiling():
        raise ValueError(
            f"{name} must hold data, got a FakeTensor: pass a tensor made outside FakeTensorMode"
        )


def _dimension(mesh: DeviceMesh, tp_group: dist.ProcessGroup | None) -> int | None:
    """Return the dimension of ``mesh`` whose ranks are those of ``tp_group``, in the same order."""
    coordinate = mesh.get_coordinate()
    if tp_group is None or coordinate is None:
        return None
    for d in range(mesh.ndim):
        same_ranks = ranks_of(mesh.get_group(d)) == ranks_of(tp_group)
        if same_ranks and coordinate[d] == dist.get_rank(tp_group):
            return d
    return None


def ranks_of(tp_group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(tp_group)


def gathered(x: Any, hidden: Any, tp_group: dist.ProcessGroup | None) -> Any:
    """Return ``x``; if FSDP2 has sharded it, this rank's rows over ``tp_group`` in hidden's dtype.

    One all-gather. Backward sums in the dtype of ``x``, then divides as FSDP2 does.
    """
    if not (isinstance(x, DTensor) and isinstance(hidden, Tensor) and x.device == hidden.device):
        return x
    mesh = x.device_mesh
    dim = _dimension(mesh, tp_group)
    rank = 0 if dim is None else collectives.group_rank(tp_group)
    P = 1 if dim is None else mesh.size(dim)
    sharding = torch_private.fsdp_sharding(x) if dim is None or mesh.ndim > 1 else None
    if sharding is None or sharding[0].size() * P != mesh.size():
        return x
    data_mesh, divisor = sharding
    start, end = vocab_range(x.shape[0], rank, P)
    device_type = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    local = x.to_local()
    if local.requires_grad:
        local.register_hook(lambda dx: dx / divisor)
    # Without the last dimension, tensor parallelism: torch 2.9 redistributes _StridedShard wrongly.
    over_data: Any = x.placements[: data_mesh.ndim]
    of_data = [p if p.is_replicate() else Shard(p.dim) for p in over_data]
    part = from_local(local, data_mesh, of_data, (end - start, *x.shape[1:]), x.stride())
    whole = part.redistribute(placements=[Replicate()] * data_mesh.ndim, forward_dtype=dtype)
    return whole.to_local(grad_placements=[Partial()] * data_mesh.ndim)


class _Waited(torch.autograd.Function):
    """Make the current stream wait for the collective that produces ``x``.

    Until then ``x`` has no data pointer that a kernel could be launched with.
    """

    @staticmethod
    def forward(ctx, x):
        x = x.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx


def from_local(
    local: Tensor, mesh: DeviceMesh, placements: Any, shape: Iterable[int], stride: Any
) -> DTensor:
    size = torch.Size(shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)
