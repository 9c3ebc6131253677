"""The schedule of scores: the pass of the loss, which leaves out the named ids, or no pass.

T = tokens of the tensor-parallel group, V = real vocabulary rows here, H = hidden size, N ids.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flce_dist.arguments.options import Over
from flce_dist.core.call import Backward, Call, Operands, Outputs, Results, Saved
from flce_dist.core.gradients import Gradients
from flce_dist.core.statistics import Pass
from flce_dist.kernels.ids.token_ids import TokenIds, entries_by_id
from flce_dist.kernels.logits.operands import ColumnCache, rows_of
from flce_dist.kernels.logits.target import NamedIds
from flce_dist.kernels.rows.formulas import RowGradient, TokenStats
from flce_dist.parallel import collectives, transport
from flce_dist.schedules.windows import Windows, closed


class ScoresSaved(NamedTuple):
    z: Tensor  # [N], of all ranks; of a repeated id with its first entry
    logprob: Tensor  # [N], in the caller's order
    entropy: Tensor | None  # [T]
    ids: Tensor  # as in TokenIds, as the others
    token: Tensor
    place: Tensor


class RestSaved(NamedTuple):
    """What is saved beside ``ScoresSaved`` over the vocabulary."""

    other: Tensor  # [T]
    labels: Tensor  # [T], the largest id of each token
    reference: Tensor  # [T], as of the loss
    others: Tensor  # [T], sum of exponentials over the ids that are not named
    cache: Tensor | None  # as of Windows


@dataclass(frozen=True)
class Scores:
    """The first output is logprob, as ids; metrics and ``Upstream`` are lse, other, entropy [T].

    Over the vocabulary the largest id of a token takes the place of the label of ``Windows``.
    Forward: as of ``Windows``, and one more all-reduce SUM, of the logits [N] of named ids, which
    the pass over the logits yields. Backward: as of ``Windows``. D contains all factors (in fp16
    but for a power of two), so cached columns are copied window by window; the elements of named
    ids are written into each window.

    Over the ids there are gathered dot products; each rank computes those of its own rows.
    Forward: under sequence parallelism a gather of hidden; an all-reduce SUM of logits [N].
    Backward: under sequence parallelism a gather of hidden, if weight needs a gradient, in flight
    while dhidden is computed; then the sum of dhidden over ranks, in flight during dweight.
    """

    over: Over
    windows: Windows  # what the loss would take

    keeps_operands: ClassVar[bool] = True
    skips_ignored: ClassVar[bool] = True
    of_loss_only: ClassVar[bool] = False

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Outputs, Saved]:
        assert operands.offsets is not None
        one, kernels, cache, rest = Pass(call, operands), call.kernels, None, None
        one.gather.start()
        ids = kernels.sorted_ids(operands.labels, operands.offsets, call.vocab_size)
        if self.over == "ids":
            one.gather.wait()
            z = kernels.logits_at_ids(one.logits, ids.ids, ids.token, vocab_size=call.vocab_size)
            z = collectives.all_reduce_sum(z, call.tp_group)
        else:
            cache = self.windows.new_cache(call, ids.ids.device)
            z, rest = _statistics(one, ids, cache)
        logprob, lse, other, entropy = kernels.set_scores(
            z, ids, rest, vocab_size=call.vocab_size, with_entropy=call.options.with_metrics
        )
        # Copies: the caller may change what is returned.
        copy = None if entropy is None else entropy.clone()
        result = logprob.view(operands.labels.shape).clone()
        saved: Saved = ScoresSaved(z, logprob, copy, ids.ids, *ids[2:])
        if other is not None and rest is not None:
            labels = one.logits.labels
            saved += RestSaved(other.clone(), labels, rest.reference, rest.others, cache)
        return result, (lse, other, entropy), saved

    def saved_like(self, call: Call, operands: Operands) -> Saved:
        raise NotImplementedError("scores are not supported under torch.compile")

    def backward(self, given: Backward) -> Results:
        call, operands, saved = given.call, given.operands, given.saved
        assert operands is not None and operands.offsets is not None
        of = ScoresSaved(*saved[:6])
        ids = TokenIds(of.ids, operands.offsets, of.token, of.place)
        rest = None if self.over == "ids" else RestSaved(*saved[6:])
        dlogprob, dlse, dother, dentropy = given.upstream
        inverse, scale = operands.inverse_temperature, call.options.logit_scale
        if rest is not None:
            labels = rest.labels
            dlse, dother, dentropy = (_if_counted(x, labels) for x in (dlse, dother, dentropy))
            inverse = _if_counted(inverse, labels, 1.0)
            if dother is not None:
                dother = dother.where(rest.others != 0, 0.0)  # else a constant
                dlse = -dother if dlse is None else dlse - dother
        factor, sums = call.kernels.set_gradient(
            of.z, ids, of.logprob, of.entropy, (dlogprob, dlse, dentropy), inverse,
            softcap=call.options.softcap, logit_scale=scale,
        )  # fmt: skip
        if rest is None:
            return _gradients_over_ids(given, ids, factor)

        dtotal = -sums if dlse is None else dlse - sums
        slope = scale if inverse is None else scale * inverse
        affine = tuple(x * slope for x in _affine(rest, of.entropy, dtotal, dother, dentropy))
        rows = RowGradient(None, rest.reference, torch.zeros_like(dtotal), affine, None)
        if call.is_from_lse:
            unnamed = torch.stack([x for x in (dtotal, dother, dentropy) if x is not None]) * slope
            largest = unnamed.abs().amax(0).scatter_reduce_(0, ids.token, factor.abs(), "amax")
            rows = rows.balanced(largest)
            assert rows.scale is not None
            factor = factor / rows.scale.index_select(0, ids.token)
        gradients, chunk = self.windows.opened(
            given._replace(operands=operands._replace(labels=labels, inverse_temperature=inverse)),
            TokenStats(rest.reference, rest.reference, rest.others),
            rows,
            rest.cache if dentropy is None else None,
        )
        chunk = chunk._replace(elements=NamedElements(call, ids, factor))
        gradients.add(chunk)
        return closed(gradients, chunk)


class NamedElements(NamedTuple):
    """D at named ids, by each entry's factor [N]."""

    call: Call
    ids: TokenIds
    factor: Tensor

    def write(self, d: Tensor, start: int) -> None:
        first_id = self.call.vocab_start_index + start
        ids, token = self.ids.ids, self.ids.token
        self.call.kernels.write_at_ids(d, ids, token, self.factor, first_id, -1)


def _statistics(one: Pass, ids: TokenIds, cache: Tensor | None) -> tuple[Tensor, TokenStats]:
    """Return the logits of named ids, and the sums over the others; write the cache.

    The labels of ``one`` become the largest id of each token, -1 without ids.
    """
    call, N, begin, end = one.call, len(ids.ids), ids.offsets[:-1], ids.offsets[1:]
    if N:
        labels = ids.ids.index_select(0, (end - 1).clamp_min(0)).where(end > begin, -1)
    else:
        labels = torch.full_like(begin, -1)
    inverse = _if_counted(one.logits.inverse_temperature, labels, 1.0)
    z = torch.zeros(N, dtype=call.stats_dtype, device=labels.device)
    one.logits = one.logits._replace(labels=labels, inverse_temperature=inverse)
    one.target = one.target._replace(named=NamedIds(ids.ids, begin, end, z))
    windows = ColumnCache(() if cache is None else (cache,))
    stats, _ = one.chunk_loss((0, call.T), windows)
    return collectives.all_reduce_sum(z, call.tp_group), stats


def _if_counted(x: Tensor | None, labels: Tensor, otherwise: float = 0.0) -> Tensor | None:
    return None if x is None else x.where(labels != -1, otherwise)


def _affine(
    rest: RestSaved, entropy: Tensor | None, dtotal: Tensor, dother: Tensor | None,
    dentropy: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return that of ``RowGradient`` at ids that are not named, by z: with U their sum,

    ``dz_v = p_v (dtotal - dH (log p_v + H)) + exp(x_v) dother / U``, where ``log p_v = x_v -
    (log U - other)``. dtotal [T] is dlse, without dother, minus the sum of dlogprob.
    """
    is_left = rest.others != 0  # NaN stays
    left = rest.others.where(is_left, 1.0)
    p_scale = (rest.other.exp() / left).where(is_left, 0.0)  # exp(-log_total)
    a = dtotal * p_scale
    if dother is not None:
        a = a + dother / left
    if dentropy is None or entropy is None:
        return (a,)
    log_total = (left.log() - rest.other).where(is_left, 0.0)
    a = a - dentropy * (entropy - log_total) * p_scale
    return a, -dentropy * p_scale, torch.zeros_like(a)


def _gradients_over_ids(given: Backward, ids: TokenIds, factor: Tensor) -> Results:
    """Return the gradients from those of each entry's product ``h . w``, factor [N]."""
    call, operands = given.call, given.operands
    assert operands is not None
    kernels, start, gather = call.kernels, call.vocab_start_index, None
    if call.needs.weight:
        gather = transport.gather(operands.hidden, call.sequence_group)
        gather.start()
    gradients = Gradients(call, operands, given.accumulator)
    if gradients.dhidden is not None:
        gradients.dhidden.acquire()
        kernels.dhidden_of_ids(
            factor, ids, rows_of(operands.weight, 0, call.V),
            vocab_start_index=start, out=gradients.dhidden.tokens,
        )  # fmt: skip
        gradients.dhidden.start()
    if not (call.needs.weight or call.needs.bias):
        return gradients.finished()
    entries = entries_by_id(ids, factor)
    if gradients.dweight is not None and gather is not None:
        out, adds = rows_of(gradients.dweight, 0, call.V), gradients.accumulates
        if not adds:
            out.zero_()
        kernels.dweight_of_ids(entries, gather.wait(), vocab_start_index=start, out=out, adds=adds)
    if gradients.dbias is not None:
        one = factor.new_full((1, 1), 1 / call.options.logit_scale).expand(call.T, 1)
        dbias = gradients.dbias[: call.V, None]
        kernels.dweight_of_ids(entries, one, vocab_start_index=start, out=dbias, adds=False)
    return gradients.finished()
