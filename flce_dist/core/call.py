"""A call as the schedules know it: its facts, its tensors, its upstream gradients.

T = tokens on the tensor-parallel group (with max_counted those that are computed, of T_all),
V = real vocabulary rows here, H = hidden size, P = ranks.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.arguments.options import LossOptions
from flce_dist.kernels.interface import Kernels
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.rows.formulas import LossTerms
from flce_dist.parallel import transport
from flce_dist.parallel.collectives import TokenGather
from flce_dist.parallel.vocab import INVARIANT_ROWS

if TYPE_CHECKING:
    from flce_dist.core.interface import Schedule

_FEW_TOKENS = 32  # up to which rescaling cached columns takes about T / H of a call's time


class Needs(NamedTuple):
    """Which operands need a gradient, the same on every rank."""

    hidden: bool
    weight: bool  # all of it, or its last columns
    bias: bool


NO_GRADIENT = Needs(hidden=False, weight=False, bias=False)


class Upstream(NamedTuple):
    """Upstream gradients in the caller's order: [T_all] each, the loss's also a scalar.

    Those of scores are of logprob, lse, other and entropy, in these places.
    """

    loss: Tensor | None
    lse: Tensor | None = None
    logprob: Tensor | None = None
    entropy: Tensor | None = None

    @property
    def of_metrics(self) -> bool:
        return any(g is not None for g in self[1:])


class Operands(NamedTuple):
    """The tensors of a call, flat: hidden is of T_all tokens, or T_all / P if it is split.

    What is [T] here has all T_all until ``counted_operands`` has chosen the tokens.
    """

    hidden: Tensor  # [T_all or T_all / P, H]
    weight: Tensor  # [V and padding, H]
    bias: Tensor | None  # [V and padding]
    labels: Tensor  # [T] int64
    token_weight: Tensor | None  # [T] fp32 (fp64 for fp64 hidden)
    places: Tensor | None = None  # [T] int64: of chosen tokens among T_all; None if all, in order
    inverse_temperature: Tensor | None = None  # as token_weight, 1 where ignored
    offsets: Tensor | None = None  # [T + 1] int64, of scores, whose labels are ids [N]
    n_counted: Tensor | None = None  # [] int32, with skip_ignored: the others are not computed
    last_columns: Tensor | None = None  # [V and padding, r] of weight: these alone are trained

    @property
    def trained(self) -> Tensor:
        """What dweight is of, if weight needs a gradient: the weight, or its last columns."""
        return self.weight if self.last_columns is None else self.last_columns


@dataclass(frozen=True)
class Call:
    """All that a schedule knows about a call except its tensors. Pure data."""

    options: LossOptions
    dtype: torch.dtype  # of hidden, weight and bias
    T: int
    T_all: int  # tokens of the caller
    vocab_start_index: int  # of this rank's rows
    V: int  # this rank's rows below vocab_size
    vocab_size: int  # of all ranks, without padding
    needs: Needs
    schedule: Schedule
    impl: str  # "triton" or "eager"
    kernels: Kernels  # of that
    group: weakref.ref[dist.ProcessGroup] | None  # weak: a table of calls keeps no group alive

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        if self.group is None:
            return None
        group = self.group()
        if group is None:
            name = self.options.group_name
            raise RuntimeError(f"{name} must live until backward has run, got a destroyed group")
        return group

    @cached_property
    def loss_terms(self) -> LossTerms:
        options = self.options
        return LossTerms(
            label_smoothing=options.label_smoothing,
            z_loss_weight=options.z_loss_weight,
            vocab_size=self.vocab_size,
            logit_scale=options.logit_scale,
            softcap=options.softcap,
            ignore_index=options.ignore_index,
        )

    @cached_property
    def chooses_tokens(self) -> bool:
        """``LossOptions.chooses_tokens``, found once for all calls of these facts."""
        return self.options.chooses_tokens

    @cached_property
    def accumulates_dweight(self) -> bool:
        """Whether backward adds dweight to the trainer's accumulator."""
        return self.needs.weight and self.options.accumulate_dweight

    @cached_property
    def smoothing_needs_logits(self) -> bool:
        """Whether D of smoothing is computed with the logits, not beside them as ``uniform``."""
        options = self.options
        cancels = options.smoothing_cancels(self.dtype, self.vocab_size)
        return cancels or options.smoothing_is_capped

    def is_expressible(self, upstream: Upstream) -> bool:
        """Whether dlogits are ``scale * D + uniform``, with the D that forward may have cached."""
        return not (upstream.of_metrics or self.smoothing_needs_logits)

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """The ranks that hidden is split over, if it is."""
        return self.tp_group if self.options.sequence_parallel else None

    @property
    def reduces_dhidden(self) -> bool:
        """Whether dhidden is summed over ranks here."""
        return self.tp_group is not None and self.options.reduce_dhidden

    @cached_property
    def is_fp16(self) -> bool:
        """Whether the dtype is fp16: it ends at 65,504, so D is relative to lse in the GEMMs."""
        return self.dtype == torch.float16

    @cached_property
    def stats_dtype(self) -> torch.dtype:
        """Dtype of statistics and of accumulation: fp32, or fp64 for fp64 operands."""
        return torch.promote_types(self.dtype, torch.float32)

    @cached_property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of cached exponentials: up to exp(50), which bf16 holds and fp16 does not."""
        return torch.bfloat16 if self.is_fp16 else self.dtype

    @cached_property
    def rescales_cache(self) -> bool:
        """Whether cached columns are written once more before the GEMMs.

        In fp16, because the cache is bf16. In bf16 with few tokens, because rounding both D at the
        label and hidden times its scale would give dweight three times the error of eager PyTorch:
        this pass rounds D times the scale once, and with few tokens it costs little.
        """
        few = self.T <= _FEW_TOKENS
        return self.is_fp16 or (self.dtype == torch.bfloat16 and few)


def as_stored(x: Any) -> Any:
    """Return tensor x, or a copy if it is a negated view: kernels read memory without the sign."""
    return x.resolve_neg() if x is not None and x.is_neg() else x


def gathered_logits(call: Call, operands: Operands) -> tuple[TokenGather, ShardLogits]:
    """Return the gather of hidden [T, H], not started, and this shard's logits over real rows."""
    options = call.options
    bias = operands.bias
    hidden = operands.hidden
    gather = transport.gather(hidden, call.sequence_group, operands.places)
    return gather, ShardLogits(
        hidden=gather.tokens,
        weight=operands.weight if call.V == len(operands.weight) else operands.weight[: call.V],
        bias=None if bias is None else bias[: call.V].contiguous(),
        labels=operands.labels,
        vocab_start_index=call.vocab_start_index,
        ignore_index=options.ignore_index,
        logit_scale=options.logit_scale,
        softcap=options.softcap,
        group_v=INVARIANT_ROWS if options.tp_invariant else None,
        inverse_temperature=operands.inverse_temperature,
        n_counted=operands.n_counted,
    )
