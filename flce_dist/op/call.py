"""One call, apart from its tensors: what the schedules and their steps are told.

T = tokens on the tensor-parallel group, V = real vocabulary rows here, H = hidden size.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.kernels import gemm
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_gradient_formulas import RowGradient
from flce_dist.kernels.token_loss_formulas import LossTerms
from flce_dist.op.plan import Plan
from flce_dist.options import LossOptions
from flce_dist.parallel import peer_groups
from flce_dist.parallel.collectives import (
    CollectiveGather,
    CollectiveScatter,
    CollectiveSum,
    TokenGather,
    TokenSum,
    Write,
    group_rank,
)
from flce_dist.parallel.peer_copies import PeerGather, PeerScatter
from flce_dist.parallel.peer_groups import PeerMemories
from flce_dist.parallel.token_order import TokenOrder
from flce_dist.parallel.vocab import INVARIANT_ROWS, VocabShard

_FEW_TOKENS = 32  # a pass over their cached columns takes about T / H of the time of a call
_PRODUCT_FROM = 1 << 23  # cells: of fewer cuBLAS may add up the columns in parts, each rounded


@dataclass(frozen=True)
class Call:
    """Everything about one call that is not a tensor."""

    options: LossOptions
    shard: VocabShard
    plan: Plan
    order: TokenOrder
    kernels: ModuleType  # flce_dist.kernels.gpu or flce_dist.kernels.eager
    tp_group: dist.ProcessGroup | None

    @property
    def loss_terms(self) -> LossTerms:
        options = self.options
        return LossTerms(
            label_smoothing=options.label_smoothing,
            z_loss_weight=options.z_loss_weight,
            vocab_size=self.shard.vocab_size,
            logit_scale=options.logit_scale,
            softcap=options.softcap,
            ignore_index=options.ignore_index,
        )

    def logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
    ) -> ShardLogits:
        """This shard's logits over its real rows; hidden and labels are those of all T tokens."""
        V = self.shard.V
        return ShardLogits(
            hidden=hidden,
            weight=weight[:V],
            bias=None if bias is None else bias[:V].contiguous(),
            labels=labels,
            vocab_start_index=self.shard.start,
            ignore_index=self.options.ignore_index,
            logit_scale=self.options.logit_scale,
            softcap=self.options.softcap,
            group_v=INVARIANT_ROWS if self.options.tp_invariant else None,
        )

    def loss_norm(
        self, labels: Tensor, token_weight: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Return what the sum of losses is divided by, a scalar on the device; None is 1."""
        if self.options.reduction != "mean":
            return None
        if token_weight is not None:  # a caller's order decides the bits
            labels, token_weight = map(self.order.restored, (labels, token_weight))
        return self.kernels.loss_norm(labels, token_weight, self.options.ignore_index, dtype)

    @property
    def reduces_dhidden(self) -> bool:
        """Whether dhidden is summed over ranks here."""
        options = self.options
        return options.sequence_parallel or (options.reduce_dhidden and self.tp_group is not None)

    def is_one_product(self, tokens: tuple[int, int], weight: Tensor) -> bool:
        """Whether dhidden of these tokens, a chunk, is one product here but for their scales.

        The same on every rank of the group, also on one with fewer rows.
        """
        first, last = tokens
        lends = self.plan.lending is not None and first == 0
        large = (last - first) * weight.shape[1] >= _PRODUCT_FROM
        return self.lacks_only_scales(weight.dtype) and not lends and large

    def lacks_only_scales(self, dtype: torch.dtype) -> bool:
        """Whether D of all columns is kept, and gradients are products of it but for the scales.

        The same on every rank of the group.
        """
        options, keeps_all = self.options, self.plan.cached_v >= self.plan.V
        if self.rewrites(dtype) or options.label_smoothing or options.with_metrics:
            return False
        return keeps_all

    def rewrites(self, dtype: torch.dtype) -> bool:
        """Whether cached columns are written once more before products: in another dtype or scaled.

        Of a few tokens in bf16 they are then scaled: D at the label and hidden times its scale,
        each rounded, would cost dweight three times the error of eager PyTorch.
        """
        few = self.plan.T <= _FEW_TOKENS
        return dtype == torch.float16 or (dtype == torch.bfloat16 and few)

    def gather(self, hidden: Tensor) -> TokenGather:
        """Return what gathers the tokens of all ranks, or hands over the ones that are all here."""
        if not self.options.sequence_parallel:
            return TokenGather(hidden, self.order)
        return self._gather(hidden)

    def gather_scaled(self, hidden: Tensor, rows: RowGradient, labels: Tensor) -> TokenGather:
        """The same of sequence-parallel hidden states times their scales, 0 where ignored.

        rows and labels are those of all T tokens; every rank scales its own hidden, [T / P, H].
        """
        order, rank, scale = self.order, group_rank(self.tp_group), rows.scale
        assert scale is not None

        def write(out: Tensor) -> None:
            for piece in range(len(order.pieces)):
                own, t = order.local(piece), order.part(piece, rank)
                ignore_index = self.options.ignore_index
                self.kernels.scale_rows(
                    hidden[own], scale[t], labels[t], ignore_index=ignore_index, out=out[own]
                )

        return self._gather(hidden, write)

    def _gather(self, hidden: Tensor, write: Write | None = None) -> TokenGather:
        group, peers = self._sequence_group(hidden)
        if peers is not None:
            return PeerGather(hidden, self.order, peers.hidden, write)
        return CollectiveGather(hidden, self.order, group, write)

    def sum_of_dhidden(self, T: int, weight: Tensor) -> TokenSum:
        """Return what sums dhidden over ranks, with memory for what this shard adds, [T, H]."""
        wide = self.options.reduce_in_fp32 and self.reduces_dhidden
        dtype = gemm.acc_dtype(weight.dtype) if wide else weight.dtype
        shape = (T, weight.shape[1])
        if not self.options.sequence_parallel:
            share = weight.new_empty(shape, dtype=dtype)
            if self.tp_group is None or not self.reduces_dhidden:
                return TokenSum(share)
            return CollectiveSum(share, self.tp_group)
        group, peers = self._sequence_group(weight)
        if peers is not None:
            memory, add = peers.dhidden, self.kernels.sum_shares
            accumulates = len(self.plan.chunks()) == 1 and not self.is_one_product((0, T), weight)
            return PeerScatter(shape, dtype, self.order, memory, add, accumulates=accumulates)
        return CollectiveScatter(weight.new_empty(shape, dtype=dtype), self.order, group)

    def _sequence_group(self, x: Tensor) -> tuple[dist.ProcessGroup, PeerMemories | None]:
        assert self.tp_group is not None
        return self.tp_group, peer_groups.of_group(self.tp_group, x.device)


def kernels_of(impl: str) -> ModuleType:
    """Import on demand: a machine that only runs eager needs no working triton."""
    if impl == "triton":
        from flce_dist.kernels import gpu

        return gpu
    from flce_dist.kernels import eager

    return eager
