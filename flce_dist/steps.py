"""The steps that all schedules share; ``autograd.py`` puts them in order.

T = tokens on the tensor-parallel group, V = real vocabulary rows here, H = hidden size.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import collectives
from flce_dist.kernels import gemm
from flce_dist.kernels.column_cache import ColumnCache
from flce_dist.kernels.merge import LossTerms, TokenStats, token_entropy
from flce_dist.kernels.row_gradient import RowGradient
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.options import LossOptions
from flce_dist.plan import Plan
from flce_dist.token_order import TokenOrder
from flce_dist.vocab import INVARIANT_ROWS, VocabShard


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

    def share_of_dhidden(self, T: int, weight: Tensor) -> Tensor:
        """Return memory for what this shard adds to dhidden, [T, H], as it will be sent."""
        wide = self.options.reduce_in_fp32 and self.reduces_dhidden
        dtype = gemm.acc_dtype(weight.dtype) if wide else weight.dtype
        return weight.new_empty(T, weight.shape[1], dtype=dtype)

    def gather(self, hidden: Tensor) -> collectives.TokenGather:
        """Return what gathers the tokens of all ranks, or hands over the ones that are all here."""
        group = self.tp_group if self.options.sequence_parallel else None
        return collectives.TokenGather(hidden, self.order, group)

    def sum_dhidden(self, share: Tensor) -> collectives.TokenScatter | collectives.TokenSum:
        """Return what sums this shard's share of dhidden over ranks."""
        if self.options.sequence_parallel:
            assert self.tp_group is not None
            return collectives.TokenScatter(share, self.order, self.tp_group)
        return collectives.TokenSum(share, self.tp_group if self.reduces_dhidden else None)


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


def chunk_cache(call: Call, chunk: ShardLogits, dweight: Tensor | None, first: bool) -> ColumnCache:
    """Return windows for the exponentials of a chunk of tokens.

    Of the first chunk the leading ones lie in dweight's own memory, as ``plan.Lending`` says.
    """
    T, V, dtype = chunk.T, chunk.V, chunk.cache_dtype
    windows = []
    if first and dweight is not None and call.plan.lending is not None:
        flat = dweight.view(-1)
        for columns, row in call.plan.lending.windows:
            start, cells = row * chunk.H, T * columns * dtype.itemsize // flat.element_size()
            if start + cells <= V * chunk.H:  # not so in a shard smaller than the plan's
                window = flat[start : start + cells].view(dtype)
                windows.append(window.view(T, columns))
    columns = call.plan.cached_columns(V) if first else V
    rest = columns - sum(window.shape[1] for window in windows)
    if rest > 0:
        windows.append(new_window(T, rest, dtype, chunk.hidden.device))
    return ColumnCache(tuple(windows))


def token_loss(
    call: Call,
    logits: ShardLogits,
    gather: collectives.TokenGather,
    tokens: tuple[int, int],
    token_weight: Tensor | None,
    cache: ColumnCache,
) -> tuple[TokenStats, Tensor]:
    """Return the statistics of the whole vocabulary and the weighted loss of some tokens, each [T].

    They are whole pieces of the gather, each waited for where it is needed. All-reduces: the SUM of
    the label's logit [T] piece by piece, MAX of the others [T], SUM of the sums: 2 to 6 rows of [T]
    fp64, for ``impl="eager"`` 1 to 3 in the dtype of statistics. They are issued whether or not any
    row needs the rescue, so that ranks never disagree. ``cache`` receives D of its columns (see
    ``row_gradient``); its labels' columns now, not in backward: a saved tensor must not change
    between two backward passes.
    """
    options, kernels, group = call.options, call.kernels, call.tp_group
    with_entropy, with_sum_z = options.with_metrics, options.label_smoothing != 0.0

    found = []
    first, last = tokens
    for piece, (start, end) in call.order.between(first, last):
        gather.wait(piece)
        part = logits.tokens(start, end)
        label_logit = kernels.label_logit(part, vocab_size=call.shard.vocab_size)
        pending = collectives.start_all_reduce(label_logit, group)
        # Behind this sum, which the statistics wait for, and beside them.
        gather.start(piece + 1)
        label_logit = pending.wait()
        others_max, sums = kernels.linear_stats(
            part,
            label_logit,
            cache=cache.tokens(start - first, end - first),
            with_sum_z=with_sum_z,
            with_entropy=with_entropy,
        )
        found.append((label_logit, others_max, sums))
    label_logit, others_max, sums = (_joined(parts) for parts in zip(*found, strict=True))

    logits = logits.tokens(first, last)
    others_max = collectives.all_reduce_max(others_max, group)
    sums = kernels.rescue(
        logits, label_logit, others_max, sums, cache=cache, with_entropy=with_entropy
    )
    sums = collectives.all_reduce_sum(sums, group)
    stats, loss, label_value = kernels.token_loss(
        logits.labels,
        token_weight,
        label_logit,
        others_max,
        sums,
        call.loss_terms,
        with_entropy=with_entropy,
    )
    if cache.dtype == logits.hidden.dtype:  # else it is written where it is converted
        for start, window in cache.pieces():
            kernels.write_label_value(
                window,
                logits.labels,
                label_value,
                vocab_start_index=logits.vocab_start_index + start,
                ignore_index=options.ignore_index,
            )
    return stats, loss


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """Put [..., T] of several pieces beside each other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def reduced_loss(call: Call, loss: Tensor, norm: Tensor | None) -> Tensor:
    """Return the loss that was asked for of each token's [T]: in a caller's order, or reduced."""
    loss = call.order.restored(loss)  # before it is summed, so that this order decides the bits
    return loss if call.options.reduction == "none" else call.kernels.reduce_loss(loss, norm)


def metrics(stats: TokenStats, logits: ShardLogits) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(lse, logprob, entropy, correct)``, each [T]."""
    assert stats.others_max is not None
    correct = (stats.others_max <= stats.label_logit) & logits.counted
    return stats.lse, stats.logprob, token_entropy(stats), correct


def in_forward_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which in_forward saves gradients: the sum over tokens may leave fp16's range."""
    return torch.float32 if dtype == torch.float16 else dtype


def from_lse(dtype: torch.dtype) -> bool:
    """Whether D of operands of ``dtype`` is relative to lse: fp16 must not pass 65,504."""
    return dtype == torch.float16


@dataclass
class Dlogits:
    """The matrix D of ``row_gradient``, one piece of columns at a time, in the operands' dtype."""

    call: Call
    labels: Tensor
    stats: TokenStats
    rows: RowGradient
    cache: ColumnCache
    dtype: torch.dtype
    _window: Tensor | None = None

    def pieces(self) -> list[tuple[int, int, Tensor | None]]:
        """Columns ``(start, end, cached)`` in ascending order, at least one piece."""
        V, step = self.call.shard.V, max(1, self.call.plan.window_v)
        cached_step = max(1, V) if self.cache.dtype == self.dtype else step
        return list(self.cache.walk(V, step, cached_step)) or [(0, 0, None)]

    def piece(
        self, start: int, end: int, cached: Tensor | None, logits: Callable[[], ShardLogits]
    ) -> Tensor:
        """Return D of these columns, [T, end - start]; valid until the next call.

        ``logits`` is called only if the columns must be recomputed.
        """
        if start == end:  # a shard without rows
            return self._reused_window(0)
        if cached is None:
            out = self._reused_window(end - start)
            self.call.kernels.dlogits(
                logits().columns(start, end),
                self.rows.reference,
                self.rows.label_value,
                self.rows.affine,
                out=out,
            )
            return out
        if cached.dtype == self.dtype:
            return cached
        return self._converted(cached, self.call.shard.start + start)

    def _converted(self, cached: Tensor, vocab_start_index: int) -> Tensor:
        """Bring bf16 exponentials into fp16 by changing their reference."""
        out = self._reused_window(cached.shape[1])
        change = (self.stats.reference - self.rows.reference).exp()
        ignore_index = self.call.options.ignore_index
        kernels = self.call.kernels
        kernels.scale_rows(cached, change, self.labels, ignore_index=ignore_index, out=out)
        kernels.write_label_value(
            out,
            self.labels,
            self.rows.label_value,
            vocab_start_index=vocab_start_index,
            ignore_index=ignore_index,
        )
        return out

    def _reused_window(self, columns: int) -> Tensor:
        if self._window is None or self._window.shape[1] < columns:
            self._window = new_window(len(self.labels), columns, self.dtype, self.labels.device)
        return self._window[:, :columns]


@dataclass
class Gradients:
    """Sums dhidden [T, H], dweight [V, H] and dbias [V] over pieces of D, those that are wanted.

    ``dweight`` has rows beyond the vocabulary's, which become 0; in the dtype in which products
    accumulate it sums several chunks of tokens, else there must be one.
    """

    call: Call
    dtype: torch.dtype  # of hidden
    share: Tensor | None  # of dhidden, this shard's
    dweight: Tensor | None
    dbias: Tensor | None

    def __post_init__(self) -> None:
        self._dhidden = None if self.share is None else self.call.sum_dhidden(self.share)
        if self.dweight is not None:
            self.dweight[self.call.shard.V :] = 0.0

    def add(
        self,
        tokens: tuple[int, int],
        logits: Callable[[], ShardLogits],
        weight: Tensor,
        labels: Tensor,
        rows: RowGradient,
        dlogits: Dlogits,
    ) -> None:
        """Take all columns of ``tokens``, once for each token.

        ``logits`` of them is called where their hidden states are needed, not before. The sum of
        dhidden over ranks starts before the last dweight.
        """
        call, dweight = self.call, self.dweight
        share = None if self.share is None else self.share[slice(*tokens)]
        acc = None if share is None else rows.scale.new_empty(share.shape)
        # Until dhidden is written, at the end, its memory is free.
        lent = None if call.reduces_dhidden else share

        @functools.cache
        def scaled() -> tuple[Tensor, Tensor | None]:
            out = weight.new_empty(len(labels), weight.shape[1]) if lent is None else lent
            return scaled_hidden(call, logits(), rows, out)

        def finish_dhidden() -> None:
            if self._dhidden is not None and acc is not None and share is not None:
                write_dhidden(call, acc, weight, labels, rows, share)
                self._dhidden.start(*tokens)

        pieces = dlogits.pieces()
        for start, end, cached in pieces:
            d = dlogits.piece(start, end, cached, logits)
            if acc is not None:
                gemm.add_matmul(acc, d, weight[start:end], first=start == 0)
            if call.reduces_dhidden and (start, end) == pieces[-1][:2]:
                finish_dhidden()
            if dweight is not None:
                self._add_dweight(d, *scaled(), out=dweight[start:end], first=tokens[0] == 0)
            if self.dbias is not None:
                self.dbias[start:end] += dbias_piece(call, d, rows)
        if not call.reduces_dhidden:
            finish_dhidden()

    def _add_dweight(
        self, d: Tensor, hidden: Tensor, row: Tensor | None, *, out: Tensor, first: bool
    ) -> None:
        one_chunk = out.dtype == self.dtype and len(self.call.plan.chunks()) == 1
        if one_chunk:
            gemm.weight_grad(d, hidden, row=row, out=out)
            return
        gemm.add_matmul(out, d.T, hidden, first=first)
        if row is not None:
            out += row

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return dhidden of this rank's tokens, summed over ranks, dweight and dbias."""
        dhidden = None if self._dhidden is None else self._dhidden.wait().to(self.dtype)
        return dhidden, self.dweight, self.dbias


def scaled_hidden(
    call: Call, logits: ShardLogits, rows: RowGradient, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return hidden times each token's scale, [T, H], the right factor of dweight, in ``out``.

    The second result, [H], is what label smoothing adds to every row of dweight.
    """
    kernels, ignore_index = call.kernels, call.options.ignore_index
    row = None
    if rows.uniform is not None:
        ones = torch.ones_like(rows.uniform)
        kernels.scale_rows(logits.hidden, ones, logits.labels, ignore_index=ignore_index, out=out)
        row = gemm.weighted_row_sum(rows.uniform, out)
    kernels.scale_rows(logits.hidden, rows.scale, logits.labels, ignore_index=ignore_index, out=out)
    return out, row


def write_dhidden(
    call: Call, acc: Tensor, weight: Tensor, labels: Tensor, rows: RowGradient, out: Tensor
) -> None:
    """Write this shard's share of dhidden, [T, H], from ``acc = D @ weight``."""
    plus = None
    if rows.uniform is not None:
        ones = rows.uniform.new_ones(call.shard.V)
        plus = rows.uniform, gemm.weighted_row_sum(ones, weight[: call.shard.V])
    ignore_index = call.options.ignore_index
    call.kernels.scale_rows(acc, rows.scale, labels, ignore_index=ignore_index, plus=plus, out=out)


def dbias_piece(call: Call, d: Tensor, rows: RowGradient) -> Tensor:
    """Return [W]: the bias gradient of the columns of ``d`` [T, W]."""
    dbias = gemm.weighted_row_sum(rows.scale, d)
    if rows.uniform is not None:
        dbias = dbias + rows.uniform.sum()
    return dbias / call.options.logit_scale
