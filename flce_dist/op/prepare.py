"""From a caller's arguments to a planned call on flat tensors."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.op import checks
from flce_dist.op.plan import Plan, plan
from flce_dist.options import LossOptions
from flce_dist.parallel import collectives
from flce_dist.parallel.token_order import TokenOrder
from flce_dist.parallel.vocab import real_rows

_FEW_TOKENS = 32  # up to which rescaling cached columns takes about T / H of a call's time


class Arguments(NamedTuple):
    """The arguments of ``linear_cross_entropy``; ``in_autocast_dtype`` settles their dtypes."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    token_weight: Tensor | None
    options: LossOptions
    tp_group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Call:
    """All that the schedules know about a call except its tensors. Pure data."""

    options: LossOptions
    dtype: torch.dtype  # of hidden, weight and bias
    vocab_start_index: int  # of this rank's rows
    V: int  # this rank's rows below vocab_size
    vocab_size: int  # of all ranks, without padding
    plan: Plan
    expressible: bool  # of the loss: dlogits are scale * D + uniform, so D may be cached
    order: TokenOrder
    kernels: ModuleType  # flce_dist.kernels.gpu or flce_dist.kernels.eager
    tp_group: dist.ProcessGroup | None

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """The ranks that hidden is split over, if it is."""
        return self.tp_group if self.options.sequence_parallel else None

    @property
    def reduces_dhidden(self) -> bool:
        """Whether dhidden is summed over ranks here."""
        return self.tp_group is not None and self.options.reduce_dhidden

    @property
    def is_from_lse(self) -> bool:
        """Whether D is relative to lse in the GEMMs: fp16 must not pass 65,504.

        Filtered gradients replace D by probabilities.
        """
        return self.dtype == torch.float16 or self.plan.schedule == "filtered"

    @property
    def rescales_cache(self) -> bool:
        """Whether cached columns are written once more before the GEMMs.

        In fp16, because the cache is bf16. In bf16 with few tokens, because rounding both D at the
        label and hidden times its scale would give dweight three times the error of eager PyTorch:
        this pass rounds D times the scale once, and with few tokens it costs little.
        """
        few = self.plan.T <= _FEW_TOKENS
        return self.dtype == torch.float16 or (self.dtype == torch.bfloat16 and few)


class Operands(NamedTuple):
    """The tensors of a call, flat: T tokens, or T / P of hidden if it is split by token."""

    hidden: Tensor  # [T or T / P, H]
    weight: Tensor  # [V and padding, H]
    bias: Tensor | None  # [V and padding]
    labels: Tensor  # [T] int64, in the order of the pieces
    token_weight: Tensor | None  # [T] fp32 (fp64 for fp64 hidden), likewise


def in_autocast_dtype(arguments: Arguments) -> Arguments:
    """Under autocast, cast the operands to its dtype as ``torch.nn.functional.linear`` does."""
    hidden, weight, bias = arguments.hidden, arguments.weight, arguments.bias
    if not isinstance(hidden, Tensor):
        return arguments
    device_type = hidden.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return arguments
    dtype = torch.get_autocast_dtype(device_type)

    def to(x: Any) -> Any:
        takes_part = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if takes_part else x

    return arguments._replace(hidden=to(hidden), weight=to(weight), bias=to(bias))


def gradients_needed(arguments: Arguments) -> list[bool]:
    """Return whether hidden, weight and bias need a gradient in the current grad mode."""
    operands = (arguments.hidden, arguments.weight, arguments.bias)
    return [torch.is_grad_enabled() and getattr(x, "requires_grad", False) for x in operands]


def _as_stored(x: Any) -> Any:
    """Return tensor x, or a copy if it is a negated view: kernels read memory without the sign."""
    return x.resolve_neg() if x is not None and x.is_neg() else x


def prepare(
    arguments: Arguments, needs: list[bool], *, auto_in_forward: bool = True
) -> tuple[Call, Operands]:
    """Check the arguments' metadata, flatten tokens to one dimension, and plan.

    ``needs`` says whether hidden, weight and bias need a gradient; ``auto_in_forward`` whether
    schedule="auto" may become in_forward. Label values are not checked here: that reads data.
    """
    hidden, weight, labels, bias, token_weight, options, tp_group = arguments
    checks.check_group(tp_group, options.sequence_parallel)
    checks.check_tensors(hidden, weight, labels, bias, token_weight)
    hidden, weight, bias, token_weight = map(_as_stored, (hidden, weight, bias, token_weight))
    P, rank = collectives.group_size(tp_group), collectives.group_rank(tp_group)
    V, H = weight.shape
    checks.check_parallel_shapes(hidden, labels, V, options, P=P, rank=rank)
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
        dtype=hidden.dtype,
        vocab_start_index=start,
        V=real_rows((start, end), vocab_size),
        vocab_size=vocab_size,
        plan=chosen,
        expressible=not options.smoothing_needs_logits,
        order=order,
        kernels=kernels_of(impl),
        tp_group=tp_group if P > 1 else None,  # one rank exchanges nothing
    )
    if token_weight is not None:  # in the dtype of statistics, so that the loss keeps its dtype
        stats_dtype = torch.promote_types(hidden.dtype, torch.float32)
        token_weight = order.permuted(token_weight.reshape(-1).to(stats_dtype).contiguous())
    return call, Operands(
        hidden.reshape(-1, H),
        weight,
        bias,
        order.permuted(labels.reshape(-1).long().contiguous()),
        token_weight,
    )


def kernels_of(impl: str) -> ModuleType:
    """Import an implementation on demand: eager alone needs no working triton."""
    if impl == "triton":
        from flce_dist.kernels import gpu

        return gpu
    from flce_dist.kernels import eager

    return eager


def _plan(
    arguments: Arguments, needs: list[bool], P: int, auto_in_forward: bool
) -> tuple[Plan, TokenOrder]:
    """Return the plan, and the order of tokens that follows from its pieces."""
    hidden, weight, options = arguments.hidden, arguments.weight, arguments.options
    T, (V, H), itemsize = arguments.labels.numel(), weight.shape, weight.element_size()
    if options.vocab_range is not None:
        V = -(-(options.vocab_size or 0) // P)
    elif options.vocab_size is not None:
        V = min(V, options.vocab_size)
    # Symbolic sizes of torch.compile cannot be hashed. A plan of them only gives the fakes their
    # shapes; the operators plan again with real sizes. So it lends no memory.
    known = all(isinstance(size, int) for size in (T, V, H, options.max_logits_bytes or 0))
    P = P if known and options.sequence_parallel else 1
    # Every tile of filter_eps=0.0 is kept.
    schedule = options.schedule if options.filter_eps is None else "recompute"
    chosen = (plan if known else plan.__wrapped__)(
        T=T,
        V=V,
        itemsize=max(2, hidden.element_size()),
        schedule=schedule if any(needs) else "recompute",
        max_logits_bytes=options.max_logits_bytes,
        expressible=not options.smoothing_needs_logits,
        converts=hidden.dtype == torch.float16,
        dweight_row_bytes=(H * itemsize, H * max(4, itemsize)) if known and needs[1] else (0, 0),
        reduces=auto_in_forward and options.reduction != "none" and not options.with_metrics,
        gathers_from=P,
        filters=bool(options.filter_eps) and (any(needs) or options.with_metrics),
    )
    return chosen, TokenOrder(P, chosen.pieces(P) if known else ((0, T),))
