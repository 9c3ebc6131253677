"""DTensors as arguments.

The op and its collectives work on plain tensors. A DTensor argument is replaced by this rank's
local tensor if its placements are those that the op expects; otherwise it is refused. Through
``DTensor.to_local`` gradients get the mesh and placements of their operand. What FSDP2 has sharded
is gathered first (``fsdp``).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from flce_dist.arguments.check_tensors import check_group, is_dense
from flce_dist.arguments.fsdp import gathered
from flce_dist.arguments.meshes import dimension_of, ranks_of
from flce_dist.arguments.options import LossOptions
from flce_dist.arguments.passed import PLAIN, Arguments
from flce_dist.arguments.ways_out import IN_FORWARD_OF_FSDP
from flce_dist.parallel import collectives
from flce_dist.parallel.vocab import vocab_range
from flce_dist.torch_private.dtensors import async_tensors, fsdp_sharding
from flce_dist.torch_private.modes import FakeTensor

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

_ASYNC = async_tensors()


def localized(arguments: Arguments) -> Arguments:
    """Return the arguments with each DTensor replaced by its local tensor.

    Only global shapes and placements are checked, so either all ranks of ``tp_group`` raise or none
    does. Options have been checked before.
    """
    sequence_parallel = arguments.options.sequence_parallel
    check_group(arguments.tp_group, sequence_parallel=sequence_parallel)
    options = _with_dimension_of(arguments.hidden, arguments.options, arguments.tp_group)
    arguments = arguments._replace(options=options)
    local = _local_tensors(arguments)
    if arguments.tp_group is None:
        return local
    return local._replace(options=_options_of_global_sizes(arguments))


def local_hidden(
    hidden: Tensor, options: LossOptions, tp_group: dist.ProcessGroup | None
) -> tuple[Tensor, LossOptions]:
    """Return this rank's hidden states, and options with the dimension that a DTensor's has split.

    For what computes logits alone, without labels and a gradient.
    """
    if not isinstance(hidden, DTensor):
        return hidden, options
    options = _with_dimension_of(hidden, options, tp_group)
    tokens = Shard(options.sequence_dim) if options.sequence_parallel else Replicate()
    local = local_of("hidden", hidden, tokens, tp_group)
    _check_even(hidden, options, collectives.group_size(tp_group))
    return local, options


def _with_dimension_of(
    hidden: Tensor, options: LossOptions, tp_group: dist.ProcessGroup | None
) -> LossOptions:
    """Return the options with ``sequence_dim=1`` if hidden's placement over the group says so."""
    if not (options.sequence_parallel and isinstance(hidden, DTensor) and hidden.dim() > 2):
        return options
    dim = dimension_of(hidden.device_mesh, tp_group)
    if dim is None or hidden.placements[dim] != Shard(1):
        return options
    return replace(options, sequence_dim=1)


def _check_even(hidden: Tensor, options: LossOptions, P: int) -> None:
    dim = options.sequence_dim
    if isinstance(hidden, DTensor) and options.sequence_parallel and hidden.shape[dim] % P:
        raise ValueError(
            f"hidden must have a multiple of {P} in its {'second' if dim else 'first'} dimension "
            f"under sequence_parallel=True, got {tuple(hidden.shape)}"
        )


def _local_tensors(arguments: Arguments) -> Arguments:
    """Return the arguments with the local tensors of those placements that the options expect."""
    hidden, weight, labels, bias, token_weight, temperature, options, tp_group = arguments
    tokens = Shard(options.sequence_dim) if options.sequence_parallel else Replicate()
    rows = Replicate() if tp_group is None else Shard(0)
    # With reduce_dhidden=False each rank returns a partial sum, and DTensor adds them up.
    dhidden = None if options.reduce_dhidden else Partial()
    of_hidden = (
        f"sequence_parallel is {options.sequence_parallel}, reduce_dhidden "
        f"{options.reduce_dhidden}; {_OF_TOKENS}"
    )

    def of_rows(x: DTensor) -> str:
        if options.data_parallel:
            return _OF_DATA_ROWS
        return _OF_FSDP if fsdp_sharding(x) else _OF_ROWS

    def rows_of(name: str, x: Any) -> Any:
        x = gathered(x, hidden, tp_group)
        return local_of(name, x, rows, tp_group, of_rows, group_name=options.group_name)

    return Arguments(
        local_of("hidden", hidden, tokens, tp_group, lambda _: of_hidden, gradient=dhidden),
        rows_of("weight", weight),
        local_of("labels", labels, Replicate(), tp_group, lambda _: _OF_TOKENS),
        rows_of("bias", bias),
        local_of("token_weight", token_weight, Replicate(), tp_group),
        local_of("temperature", temperature, Replicate(), tp_group),
        options,
        tp_group,
    )


def _options_of_global_sizes(arguments: Arguments) -> LossOptions:
    """Check global sizes, of which a wrong one might show on some ranks only.

    Return options with the ``vocab_size`` and ``vocab_range`` of a DTensor weight.
    """
    hidden, weight, _, bias, *_, options, tp_group = arguments
    P = collectives.group_size(tp_group)
    rank = collectives.group_rank(tp_group)
    _check_even(hidden, options, P)
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
    way_out: Callable[[DTensor], str] | None = None,
    *,
    gradient: Placement | None = None,
    group_name: str = "tp_group",
) -> Any:
    """Return the local tensor of ``x``; raise unless its placement over the group is ``expected``.

    Over other mesh dimensions it must be replicated. ``gradient`` is the placement of its gradient
    over the group; None for the placement of ``x``. ``group_name`` is the caller's, and ``way_out``
    returns what the error suggests.
    """
    check_holds_data(name, x)
    if isinstance(x, DTensor):
        mesh = x.device_mesh
        dim = dimension_of(mesh, tp_group)
        anywhere = expected.is_replicate() and gradient is None
        fits = dim is not None or anywhere or collectives.group_size(tp_group) == 1
        if not (fits and _is_placed(x, expected, dim)) or mesh.get_coordinate() is None:
            where = "" if tp_group is None else f" over {group_name}'s ranks {ranks_of(tp_group)}"
            raise ValueError(
                f"{name} must be a plain tensor or a DTensor with {expected!r}{where} and "
                f"replicated over other ranks, got {x.placements} on {mesh}"
                + ("" if way_out is None else f"; {way_out(x)}")
            )
        gradients = [Replicate() if p.is_partial() else p for p in x.placements]
        if gradient is not None and dim is not None:
            gradients[dim] = gradient
        x = x.to_local(grad_placements=gradients)
    return _Waited.apply(x) if isinstance(x, _ASYNC) else x


def _is_placed(x: DTensor, expected: Placement, dim: int | None) -> bool:
    """Whether x has this placement over a dimension of its mesh, and all of it over the others."""
    for d, placement in enumerate(x.placements):
        wanted = expected if d == dim else Replicate()
        # To torch 2.9 a _StridedShard, as FSDP2 makes it, equals the Shard of its dimension.
        is_wanted = placement.__class__ is wanted.__class__ and placement == wanted
        if x.device_mesh.size(d) > 1 and not is_wanted:
            return False
    return True


def check_plain(name: str, x: Any, holds: str) -> None:
    """Check that ``x`` holds data, and is no DTensor: only what this rank ``holds``."""
    check_holds_data(name, x)
    if isinstance(x, DTensor):
        raise ValueError(
            f"{name} must be a plain tensor of this rank's {holds}, got a DTensor: pass "
            f"{name}.to_local()"
        )


def check_holds_data(name: str, x: Any) -> None:
    """Raise if ``x`` is a FakeTensor, or holds other tensors, outside compiled code.

    Beside real tensors the mode of a FakeTensor may let a result be memory that nothing has been
    written to.
    """
    if x is None or type(x) in PLAIN or torch.compiler.is_compiling():
        return
    if isinstance(x, FakeTensor):
        raise ValueError(
            f"{name} must hold data, got a FakeTensor: pass a tensor made outside FakeTensorMode"
        )
    check_has_memory(name, x)


def check_has_memory(name: str, x: Any) -> None:
    """Raise if ``x`` holds other tensors, such as a quantised one: kernels need an address."""
    has_memory = type(x) in PLAIN or isinstance(x, (DTensor, FakeTensor, *_ASYNC))
    if has_memory or not isinstance(x, Tensor) or not is_dense(x) or x.is_meta:
        return
    try:
        x.untyped_storage().data_ptr()
    except RuntimeError:
        raise ValueError(
            f"{name} must be a plain tensor or a DTensor, got {type(x).__name__}, which holds "
            f"others: pass what it stands for, for example {name}.dequantize()"
        ) from None


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
