"""From a caller's arguments to a planned call on flat tensors."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.op import checks
from flce_dist.op.call import Call, kernels_of
from flce_dist.op.plan import Plan, plan
from flce_dist.options import LossOptions
from flce_dist.parallel import collectives
from flce_dist.parallel.token_order import TokenOrder
from flce_dist.parallel.vocab import VocabShard


class Arguments(NamedTuple):
    """What a caller gave, see ``linear_cross_entropy``; its dtypes settled by autocast."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    token_weight: Tensor | None
    options: LossOptions
    tp_group: dist.ProcessGroup | None


class Prepared(NamedTuple):
    """What the schedules take: T tokens on the group, [T / P, H] under sequence parallelism."""

    call: Call
    hidden: Tensor  # [T or T / P, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    labels: Tensor  # [T] int64, in the order of the walk
    token_weight: Tensor | None  # [T] fp32 (fp64 for fp64 hidden), likewise


def in_autocast_dtype(arguments: Arguments) -> Arguments:
    """Under autocast, take the operands to its dtype as ``torch.nn.functional.linear`` would."""
    hidden, weight, bias = arguments.hidden, arguments.weight, arguments.bias
    if not isinstance(hidden, Tensor):
        return arguments
    device_type = hidden.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return arguments
    dtype = torch.get_autocast_dtype(device_type)

    def to(x: Tensor) -> Tensor:
        takes_part = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if takes_part else x

    bias = None if bias is None else to(bias)
    return arguments._replace(hidden=to(hidden), weight=to(weight), bias=bias)


def gradients_needed(arguments: Arguments) -> list[bool]:
    """Return whether hidden, weight and bias need a gradient, now and here."""
    operands = (arguments.hidden, arguments.weight, arguments.bias)
    return [torch.is_grad_enabled() and getattr(x, "requires_grad", False) for x in operands]


def prepare(arguments: Arguments, needs: list[bool], *, auto_in_forward: bool = True) -> Prepared:
    """Check all that metadata tell, flatten tokens to one dimension, and plan.

    ``needs`` says whether hidden, weight and bias need a gradient; ``auto_in_forward`` whether
    ``auto`` may take them in forward. Whether labels are in range is not checked here: that reads
    data.
    """
    options = checks.check_options(arguments.options)
    arguments = arguments._replace(options=options)
    hidden, weight, labels, bias, token_weight, _, tp_group = arguments
    checks.check_group(tp_group, options.sequence_parallel)
    checks.check_tensors(hidden, weight, labels, bias, token_weight)
    P, rank = collectives.group_size(tp_group), collectives.group_rank(tp_group)
    V, H = weight.shape
    checks.check_parallel_shapes(
        hidden,
        labels,
        V,
        P=P,
        rank=rank,
        sequence_parallel=options.sequence_parallel,
        vocab_size=options.vocab_size,
        vocab_range=options.vocab_range,
    )
    impl = options.impl or ("triton" if hidden.is_cuda else "eager")
    checks.check_impl(impl, hidden)

    chosen, order = _plan(arguments, needs, P, auto_in_forward)
    vocab_size = V * P if options.vocab_size is None else options.vocab_size
    start, end = options.vocab_range or (rank * V, (rank + 1) * V)
    if options.tp_invariant:
        alike = [(r * V, (r + 1) * V) for r in range(P)]
        checks.check_invariant(impl, [(start, end)] if options.vocab_range else alike)
    call = Call(
        options=options,
        shard=VocabShard(start, end, vocab_size),
        plan=chosen,
        order=order,
        kernels=kernels_of(impl),
        tp_group=tp_group,
    )
    return Prepared(
        call,
        hidden.reshape(-1, H),
        weight,
        bias,
        order.walked(labels.reshape(-1).long().contiguous()),
        None if token_weight is None else order.walked(_flat_weights(token_weight, hidden)),
    )


def _flat_weights(token_weight: Tensor, hidden: Tensor) -> Tensor:
    """[T] in the dtype of statistics, in which the loss is returned whatever weights came in."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return token_weight.reshape(-1).to(dtype).contiguous()


def _plan(
    arguments: Arguments, needs: list[bool], P: int, auto_in_forward: bool
) -> tuple[Plan, TokenOrder]:
    """Return the plan, and the order in which tokens are walked along it."""
    hidden, weight, options = arguments.hidden, arguments.weight, arguments.options
    T, (V, H), itemsize = arguments.labels.numel(), weight.shape, weight.element_size()
    if options.vocab_range is not None:
        V = -(-(options.vocab_size or 0) // P)
    elif options.vocab_size is not None:
        V = min(V, options.vocab_size)
    # Sizes that torch.compile left open are not hashed, and no memory is lent for them: operators
    # are only shaped by such a plan, and run by one of their own.
    known = all(isinstance(size, int) for size in (T, V, H, options.max_logits_bytes or 0))
    lends = known and needs[1]
    chosen = (plan if known else plan.__wrapped__)(
        T=T,
        V=V,
        itemsize=max(2, hidden.element_size()),
        schedule=options.schedule if any(needs) else "recompute",
        max_logits_bytes=options.max_logits_bytes,
        expressible=not options.smoothing_needs_logits,
        converts=hidden.dtype == torch.float16,
        dweight_row_bytes=(H * itemsize, H * max(4, itemsize)) if lends else (0, 0),
        reduces=auto_in_forward and options.reduction != "none" and not options.with_metrics,
        gathers_from=P if known and options.sequence_parallel else 1,
    )
    if not known:
        return chosen, TokenOrder(1, ((0, T),))
    return chosen, TokenOrder(P if options.sequence_parallel else 1, chosen.pieces())
