"""Scores over the vocabulary: the pass of the loss, which leaves out the named ids.

T = tokens on the tensor-parallel group, V = real vocabulary rows here, H = hidden size, N = ids of
all tokens.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flce_dist.kernels.column_cache import ColumnCache
from flce_dist.kernels.scores.token_ids import Rest, TokenIds, set_gradient, sorted_ids
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_gradient_formulas import RowGradient
from flce_dist.kernels.token_loss_formulas import TokenStats, first_reference
from flce_dist.op.call import (
    Accumulator,
    Call,
    Operands,
    Outputs,
    Results,
    Saved,
    Schedule,
    Upstream,
)
from flce_dist.op.statistics import shard_logits
from flce_dist.op.windows import Windows
from flce_dist.parallel import collectives, transport
from flce_dist.parallel.token_order import TokenOrder


class OverVocabularySaved(NamedTuple):
    cache: Tensor | None  # as of Windows
    z: Tensor  # [N], of all ranks
    logprob: Tensor  # [N]
    other: Tensor  # [T]
    entropy: Tensor | None  # [T]
    labels: Tensor  # [T], the largest id of each token
    reference: Tensor  # [T], as of the loss
    others: Tensor  # [T], sum of exponentials over the ids that are not named
    ids: Tensor  # as in TokenIds, as the others
    token: Tensor
    first: Tensor
    place: Tensor


@dataclass(frozen=True)
class OverVocabulary:
    """The largest id of a token takes the place of the label of ``Windows``.

    Forward: as of ``Windows``, with a gather in one piece, and one more all-reduce SUM, of the
    logits [N] of named ids, which the pass over the logits yields. Backward: as of ``Windows``. D
    contains all factors, so cached columns are copied window by window; the elements of named ids
    are written into each window.
    """

    with_entropy: bool
    windows: Windows | None = None

    keeps_operands: ClassVar[bool] = True

    def planned(self, loss: Schedule, order: TokenOrder) -> tuple[Schedule, TokenOrder]:
        assert isinstance(loss, Windows)
        return replace(self, windows=loss), replace(order, pieces=((0, loss.T),))

    def chunks(self) -> list[tuple[int, int]]:
        assert self.windows is not None
        return self.windows.chunks()

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Outputs, Saved]:
        assert self.windows is not None and operands.offsets is not None
        gather = transport.gather(operands.hidden, call.order, call.sequence_group)
        gather.start_all()
        ids = sorted_ids(operands.labels, operands.offsets, call.vocab_size)
        named = ids.ids, ids.offsets[:-1], ids.offsets[1:]
        logits = shard_logits(call, operands, gather.wait_all())._replace(
            labels=_largest_ids(ids), named=named
        )
        cache = self.windows.new_cache(call, operands.hidden.device)
        z, rest = self._statistics(call, logits, ids, cache)
        logprob, lse, other, entropy = call.kernels.set_scores(
            z, ids, rest, with_entropy=self.with_entropy
        )
        assert other is not None
        copies = (None if x is None else x.clone() for x in (logprob, other, entropy))
        saved = (
            cache, z, *copies, logits.labels, rest.reference, rest.others,
            ids.ids, ids.token, ids.first, ids.place,
        )  # fmt: skip
        return logprob, (lse, other, entropy), saved

    def _statistics(
        self, call: Call, logits: ShardLogits, ids: TokenIds, cache: Tensor | None
    ) -> tuple[Tensor, Rest]:
        """Return the logits of named ids, and the sums over the others; write the cache."""
        kernels, group, with_entropy = call.kernels, call.tp_group, self.with_entropy
        windows = ColumnCache(() if cache is None else (cache,))
        label_logit = logits.hidden.new_empty(call.T, dtype=call.stats_dtype)
        others_max, x = torch.empty_like(label_logit), label_logit.new_zeros(len(ids.ids))
        sums = kernels.new_sums(logits, with_sum_z=False, with_entropy=with_entropy)
        kernels.label_logit(logits, vocab_size=call.vocab_size, out=label_logit)
        label_logit = collectives.all_reduce_sum(label_logit, group)
        kernels.linear_stats(
            logits, label_logit, cache=windows, with_sum_z=False, with_entropy=with_entropy,
            others_max=others_max, sums=sums, named_x=x,
        )  # fmt: skip
        x = collectives.all_reduce_sum(x, group)
        z = x + first_reference(label_logit).index_select(0, ids.token)
        z = z.index_select(0, _firsts(ids))  # x of a repeated id was taken out before
        others_max = collectives.all_reduce_max(others_max, group)
        sums = kernels.rescue(
            logits, label_logit, others_max, sums, cache=windows, with_entropy=with_entropy
        )
        stats, _, _ = kernels.token_loss(
            logits.labels, None, label_logit, others_max,
            collectives.all_reduce_sum(sums, group), call.loss_terms,
            with_entropy=with_entropy, inverse_temperature=logits.inverse_temperature,
        )  # fmt: skip
        return z, Rest(stats.reference, stats.others, stats.sum_ez)

    def saved_like(self, call: Call, operands: Operands) -> Saved:
        raise NotImplementedError("scores are not supported under torch.compile")

    def backward(
        self,
        call: Call,
        operands: Operands | None,
        saved: Saved,
        upstream: Upstream,
        accumulator: Accumulator | None,
        *,
        is_last: bool,
    ) -> Results:
        assert self.windows is not None
        assert operands is not None and operands.offsets is not None
        of = OverVocabularySaved(*saved)
        ids = TokenIds(of.ids, operands.offsets, of.token, of.first, of.place)
        dlogprob, dlse, dother, dentropy = upstream
        if dother is not None:
            dother = dother.where(of.others > 0, 0.0)  # else a constant
            dlse = -dother if dlse is None else dlse - dother
        inverse, options = operands.inverse_temperature, call.options
        factor, sums = set_gradient(
            of.z, ids, of.logprob, of.entropy, (dlogprob, dlse, dentropy), inverse,
            softcap=options.softcap, logit_scale=options.logit_scale,
        )  # fmt: skip
        rows = _row_gradient(of, sums, dlse, dother, dentropy)
        scale = options.logit_scale if inverse is None else options.logit_scale * inverse
        rows = rows._replace(affine=tuple(x * scale for x in rows.affine))

        def overwrite(d: Tensor, start: int) -> None:
            call.kernels.write_named(
                d, ids, factor, vocab_start_index=call.vocab_start_index + start
            )

        operands = operands._replace(labels=of.labels)
        stats = TokenStats(of.reference, of.reference, of.others)
        return self.windows.gradients(
            call, operands, stats, rows, of.cache if dentropy is None else None, accumulator,
            may_recompute=self.with_entropy, overwrite=overwrite,
        )  # fmt: skip


def _largest_ids(ids: TokenIds) -> Tensor:
    """Return [T]: the last of each token's ids, -1 without ids."""
    if not len(ids.ids):
        return ids.offsets.new_full((len(ids.offsets) - 1,), -1)
    begin, end = ids.offsets[:-1], ids.offsets[1:]
    return ids.ids.index_select(0, (end - 1).clamp_min(0)).where(end > begin, -1)


def _firsts(ids: TokenIds) -> Tensor:
    """Return [N]: the first entry of the same token and id; any for padding.

    Not by cummax, which takes a tenth of a pass over the vocabulary for 64 ids of each token.
    """
    N = len(ids.ids)
    run, n = ids.first.cumsum(0), torch.arange(N, device=ids.ids.device)
    firsts = n.new_zeros(N + 1).scatter_(0, run.where(ids.first, 0), n)
    return firsts.index_select(0, run)


def _row_gradient(
    of: OverVocabularySaved,
    sums: Tensor,
    dlse: Tensor | None,
    dother: Tensor | None,
    dentropy: Tensor | None,
) -> RowGradient:
    """Return the gradient at ids that are not named: with U their sum of exponentials,

    ``dz_v = p_v (dlse - G - dH (log p_v + H)) + exp(x_v) dother / U``, where ``log p_v = x_v -
    (log U - other)``. dlse already lacks dother.
    """
    is_left = of.others > 0
    left = of.others.where(is_left, 1.0)
    p_scale = (of.other.exp() / left).where(is_left, 0.0)  # exp(-log_total)
    a = (-sums if dlse is None else dlse - sums) * p_scale
    if dother is not None:
        a = a + dother / left
    affine: tuple[Tensor, ...] = (a,)
    if dentropy is not None and of.entropy is not None:
        log_total = (left.log() - of.other).where(is_left, 0.0)
        a = a - dentropy * (of.entropy - log_total) * p_scale
        affine = a, -dentropy * p_scale, torch.zeros_like(a)
    return RowGradient(None, of.reference, torch.zeros_like(a), affine, None)
