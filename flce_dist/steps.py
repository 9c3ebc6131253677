"""The steps that all schedules share; ``autograd.py`` puts them in order.

T = tokens on the tensor-parallel group, V = real vocabulary rows here, H = hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import collectives
from flce_dist.kernels import gemm, merge, row_gradient
from flce_dist.kernels.merge import TokenStats
from flce_dist.kernels.row_gradient import RowGradient
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.options import LossOptions
from flce_dist.plan import Plan
from flce_dist.vocab import VocabShard


class LossTerms(TypedDict):
    label_smoothing: float
    z_loss_weight: float
    vocab_size: int


@dataclass(frozen=True)
class Call:
    """Everything about one call that is not a tensor."""

    options: LossOptions
    shard: VocabShard
    plan: Plan
    kernels: ModuleType  # flce_dist.kernels.gpu or flce_dist.kernels.eager
    tp_group: dist.ProcessGroup | None

    @property
    def loss_terms(self) -> LossTerms:
        return {
            "label_smoothing": self.options.label_smoothing,
            "z_loss_weight": self.options.z_loss_weight,
            "vocab_size": self.shard.vocab_size,
        }

    def logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
    ) -> ShardLogits:
        """This shard's logits over its real rows; hidden and labels are those of all T tokens."""
        V = self.shard.V
        return ShardLogits(
            hidden=hidden,
            weight=weight[:V],
            bias=None if bias is None else bias[:V].contiguous(),
            labels=labels.contiguous(),
            vocab_start_index=self.shard.start,
            ignore_index=self.options.ignore_index,
            logit_scale=self.options.logit_scale,
            softcap=self.options.softcap,
        )

    def start_gather(self, hidden: Tensor) -> collectives.Pending:
        """Begin to gather the tokens of all ranks, or hand over the ones that are all here."""
        group = self.tp_group if self.options.sequence_parallel else None
        return collectives.start_gather_tokens(hidden, group)

    def start_reduce_dhidden(self, dhidden: Tensor) -> collectives.Pending:
        """Begin to sum this shard's share of dhidden over ranks."""
        if self.options.sequence_parallel:
            return collectives.start_scatter_tokens(dhidden, self.tp_group)
        group = self.tp_group if self.options.reduce_dhidden else None
        return collectives.start_all_reduce(dhidden, group)


def kernels_of(impl: str) -> ModuleType:
    """Import on demand: a machine that only runs eager needs no working triton."""
    if impl == "triton":
        from flce_dist.kernels import gpu

        return gpu
    from flce_dist.kernels import eager

    return eager


def new_window(T: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised [T, columns] whose rows start on 16 bytes, as TMA stores want."""
    padded = -(-columns // 16) * 16
    return torch.empty(T, padded, dtype=dtype, device=device)[:, :columns]


def shard_stats(call: Call, logits: ShardLogits, cache: Tensor | None) -> TokenStats:
    """Compute this shard's statistics and merge them over the tensor-parallel group.

    Three all-reduces: SUM of the label's logit [T], MAX of the others [T], SUM of the sums
    [1 to 3, T]. They are issued whether or not any row needs the rescue, so that ranks never
    disagree. ``cache`` [T, cached_v] receives D of its columns (see ``row_gradient``).
    """
    options, kernels, group = call.options, call.kernels, call.tp_group
    with_entropy, with_sum_z = options.with_metrics, options.label_smoothing != 0.0

    label_logit = collectives.all_reduce_sum(kernels.label_logit(logits), group)
    others_max, partial_sums = kernels.linear_stats(
        logits, label_logit, cache=cache, with_sum_z=with_sum_z, with_entropy=with_entropy
    )
    others_max = collectives.all_reduce_max(others_max, group)
    reference = merge.pick_reference(label_logit, others_max)
    sums = kernels.rescue(
        logits, label_logit, reference, partial_sums, cache=cache, with_entropy=with_entropy
    )
    sums = collectives.all_reduce_sum(sums, group)

    stats = merge.token_stats(
        label_logit,
        reference,
        others_max,
        others=sums[0],
        sum_ez=sums[1] if with_entropy else None,
        sum_z=sums[-1] if with_sum_z else None,
    )
    if cache is not None and cache.dtype == logits.hidden.dtype:
        # Now, not in backward: a saved tensor must not change between two backward passes.
        value = row_gradient.label_value(
            stats,
            reference,
            options.softcap,
            label_smoothing=options.label_smoothing,
            z_loss_weight=options.z_loss_weight,
        )
        merge.write_label(cache, logits.labels, value, vocab_start_index=logits.vocab_start_index)
    return stats


def token_weights(logits: ShardLogits, token_weight: Tensor | None) -> Tensor:
    """Return [T]: the weight of each token's loss, 0 where ignored."""
    counted = logits.counted
    if token_weight is None:
        return counted.to(logits.stats_dtype)
    return token_weight.to(logits.stats_dtype).where(counted, 0.0)


def loss_norm(weights: Tensor, reduction: str) -> Tensor:
    """Return what the weighted losses are divided by, a scalar on the device.

    Under "mean" the sum of weights, or 1 where that is 0: the loss of no counted token is 0.
    """
    if reduction != "mean":
        return weights.new_ones(())
    norm = weights.sum()
    return norm.where(norm != 0, 1.0)


def metrics(stats: TokenStats, logits: ShardLogits) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(lse, logprob, entropy, correct)``, each [T]."""
    assert stats.others_max is not None
    correct = (stats.others_max <= stats.label_logit) & logits.counted
    return stats.lse.clone(), stats.logprob.clone(), merge.token_entropy(stats), correct


def backward_reference(stats: TokenStats, dtype: torch.dtype) -> Tensor:
    """Return the reference of D for operands of ``dtype``: in fp16 it must not pass 65,504."""
    return stats.lse if dtype == torch.float16 else stats.reference


@dataclass
class Dlogits:
    """The matrix D of ``row_gradient``, one piece of columns at a time, in the operands' dtype."""

    call: Call
    labels: Tensor
    stats: TokenStats
    rows: RowGradient
    cache: Tensor | None
    dtype: torch.dtype
    _window: Tensor | None = None

    @property
    def cached_v(self) -> int:
        return 0 if self.cache is None else self.cache.shape[1]

    def pieces(self) -> list[tuple[int, int]]:
        """Columns ``(start, end)``: cached ones first, at least one piece."""
        V, step = self.call.shard.V, max(1, self.call.plan.window_v)
        whole = self.cache is not None and self.cache.dtype == self.dtype
        cached_step = max(1, self.cached_v) if whole else step
        starts = [*range(0, self.cached_v, cached_step), *range(self.cached_v, V, step)]
        return list(zip(starts, [*starts[1:], V], strict=True)) if starts else [(0, 0)]

    def piece(self, start: int, end: int, logits: Callable[[], ShardLogits]) -> Tensor:
        """Return D of these columns, [T, end - start]; valid until the next call.

        ``logits`` is called only if the columns must be recomputed.
        """
        if start == end:  # a shard without rows
            return self._reused_window(0)
        if end > self.cached_v:
            out = self._reused_window(end - start)
            self.call.kernels.dlogits(
                logits().columns(start, end),
                self.rows.reference,
                self.rows.label_value,
                self.rows.affine,
                out=out,
            )
            return out
        assert self.cache is not None
        cached = self.cache[:, start:end]
        if cached.dtype == self.dtype:
            return cached
        return self._converted(cached, self.call.shard.start + start)

    def _converted(self, cached: Tensor, vocab_start_index: int) -> Tensor:
        """Bring bf16 exponentials into fp16 by changing their reference."""
        out = self._reused_window(cached.shape[1])
        counted = self.labels != self.call.options.ignore_index
        change = (self.stats.reference - self.rows.reference).exp()
        self.call.kernels.scale_rows(cached, change, counted, out=out)
        merge.write_label(
            out, self.labels, self.rows.label_value, vocab_start_index=vocab_start_index
        )
        return out

    def _reused_window(self, columns: int) -> Tensor:
        if self._window is None or self._window.shape[1] < columns:
            self._window = new_window(len(self.labels), columns, self.dtype, self.labels.device)
        return self._window[:, :columns]


def scaled_hidden(call: Call, logits: ShardLogits, rows: RowGradient) -> Tensor:
    """Return [T, H]: hidden times each token's scale, the right factor of dweight."""
    out = torch.empty_like(logits.hidden, memory_format=torch.contiguous_format)
    scale = rows.scale * call.options.logit_scale
    call.kernels.scale_rows(logits.hidden, scale, logits.counted, out=out)
    return out


def dweight_row(call: Call, logits: ShardLogits, rows: RowGradient) -> Tensor | None:
    """Return [H]: what label smoothing adds to every row of dweight."""
    if rows.uniform is None:
        return None
    clean = torch.empty_like(logits.hidden, memory_format=torch.contiguous_format)
    call.kernels.scale_rows(logits.hidden, torch.ones_like(rows.uniform), logits.counted, out=clean)
    return gemm.weighted_row_sum(rows.uniform * call.options.logit_scale, clean)


def finish_dhidden(
    call: Call, acc: Tensor, weight: Tensor, counted: Tensor, rows: RowGradient
) -> Tensor:
    """Return this shard's share of dhidden, [T, H] in weight's dtype, from ``acc = D @ weight``."""
    out = torch.empty_like(acc, dtype=weight.dtype)
    plus = None
    if rows.uniform is not None:
        ones = rows.uniform.new_ones(call.shard.V)
        column_sum = gemm.weighted_row_sum(ones, weight[: call.shard.V])
        plus = (rows.uniform * call.options.logit_scale, column_sum)
    scale = rows.scale * call.options.logit_scale
    call.kernels.scale_rows(acc, scale, counted, plus=plus, out=out)
    return out


def dbias_piece(d: Tensor, rows: RowGradient) -> Tensor:
    """Return [W]: the bias gradient of the columns of ``d`` [T, W]."""
    dbias = gemm.weighted_row_sum(rows.scale, d)
    return dbias if rows.uniform is None else dbias + rows.uniform.sum()
