"""The schedule of scores over the vocabulary: the pass of the loss, which leaves out named ids.

T = tokens of the tensor-parallel group, V = real vocabulary rows here, H = hidden size, N ids.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flce_dist.core.call import Call, Operands, Upstream
from flce_dist.core.interface import Backward, Outputs, Results, Saved
from flce_dist.core.statistics import Pass
from flce_dist.kernels.ids.token_ids import TokenIds
from flce_dist.kernels.logits.operands import ColumnCache
from flce_dist.kernels.logits.target import NamedIds
from flce_dist.kernels.rows.formulas import RowGradient, TokenStats
from flce_dist.parallel import collectives
from flce_dist.schedules.windows import Windows, closed
from flce_dist.scores.named import NamedSaved, begun_pass, scored


class UnnamedSaved(NamedTuple):
    """What is saved of the ids that are not named, [T] each."""

    other: Tensor  # log of their probability, as the call returns it
    labels: Tensor  # the largest id of each token, -1 without ids
    reference: Tensor  # of exponentials, as of the loss
    sum_e: Tensor  # sum of exponentials over them


@dataclass(frozen=True)
class OverVocabulary:
    """The first output is logprob, as ids; metrics and ``Upstream`` are lse, other, entropy [T].

    The largest id of a token takes the place of the label of ``Windows``.
    Forward: as of ``Windows``, and one more all-reduce SUM, of the logits [N] of named ids, which
    the pass over the logits yields. Backward: as of ``Windows``. D contains all factors (in fp16
    but for a power of two), so cached columns are copied window by window; the elements of named
    ids are written into each window.
    """

    windows: Windows  # what the loss would take

    keeps_operands: ClassVar[bool] = True
    skips_ignored: ClassVar[bool] = True

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Outputs, Saved]:
        forward_pass, ids = begun_pass(call, operands)
        cache = self.windows.new_cache(call, operands.weight.device)
        z = name_ids(forward_pass, ids)
        stats, _ = forward_pass.chunk_loss(
            (0, call.T), ColumnCache(() if cache is None else (cache,))
        )
        z = collectives.all_reduce_sum(z, call.tp_group)
        result, outputs, named = scored(call, operands, z, ids, stats)
        unnamed = unnamed_saved(outputs, forward_pass.logits.labels, stats)
        return result, outputs, (*named, *unnamed, cache)

    def backward(self, request: Backward) -> Results:
        call = request.call
        operands = request.operands
        saved = request.saved
        assert operands is not None and operands.offsets is not None
        n = len(NamedSaved._fields)
        named = NamedSaved(*saved[:n])
        unnamed = UnnamedSaved(*saved[n:-1])
        cache = saved[-1]
        ids = named.with_offsets(operands.offsets)
        inverse = if_counted(operands.inverse_temperature, unnamed.labels, 1.0)
        factors = score_factors(call, named, ids, unnamed, request.upstream, inverse)
        affine = tuple(x * factors.tempered_scale for x in _affine(unnamed, named.entropy, factors))
        rows = RowGradient(None, unnamed.reference, torch.zeros_like(factors.dtotal), affine, None)
        factor = factors.named
        if call.is_fp16:
            of_unnamed = (factors.dtotal, factors.dother, factors.dentropy)
            stacked = torch.stack([x for x in of_unnamed if x is not None])
            size = (stacked * factors.tempered_scale).abs().amax(0)
            size.scatter_reduce_(0, ids.token, factor.abs(), "amax")
            rows = rows.balanced(size).half_folded()
            assert rows.scale is not None
            factor = factor / rows.scale.index_select(0, ids.token)
        operands = operands._replace(labels=unnamed.labels, inverse_temperature=inverse)
        gradients, chunk = self.windows.opened(
            request._replace(operands=operands),
            unnamed.reference,
            rows,
            cache if factors.dentropy is None else None,
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
        ids = self.ids.ids
        token = self.ids.token
        self.call.kernels.write_at_ids(d, ids, token, self.factor, first_id, -1)


def name_ids(forward_pass: Pass, ids: TokenIds) -> Tensor:
    """Let the pass leave out named ids; return their logits [N], which it writes on their rank.

    The pass's labels become the largest id of each token, -1 without ids.
    """
    N = len(ids.ids)
    begin = ids.offsets[:-1]
    end = ids.offsets[1:]
    if N:
        labels = ids.ids.index_select(0, (end - 1).clamp_min(0)).where(end > begin, -1)
    else:
        labels = torch.full_like(begin, -1)
    inverse = if_counted(forward_pass.logits.inverse_temperature, labels, 1.0)
    z = torch.zeros(N, dtype=forward_pass.call.stats_dtype, device=labels.device)
    forward_pass.logits = forward_pass.logits._replace(labels=labels, inverse_temperature=inverse)
    forward_pass.target = forward_pass.target._replace(named=NamedIds(ids.ids, begin, end, z))
    return z


def unnamed_saved(outputs: Outputs, labels: Tensor, stats: TokenStats) -> UnnamedSaved:
    _, other, _ = outputs
    assert other is not None
    return UnnamedSaved(other.clone(), labels, stats.reference, stats.others)


def if_counted(x: Tensor | None, labels: Tensor, otherwise: float = 0.0) -> Tensor | None:
    return None if x is None else x.where(labels != -1, otherwise)


class ScoreFactors(NamedTuple):
    """Upstream gradients as factors of logits, 0 where a token is ignored."""

    named: Tensor  # [N], of each entry's product h . w
    dtotal: Tensor  # [T], of p at ids that are not named: dlse - sum of dlogprob - dother
    dother: Tensor | None  # [T], as the next one
    dentropy: Tensor | None
    tempered_scale: Tensor | float  # of a product h . w, where there is no softcap


def score_factors(
    call: Call,
    named: NamedSaved,
    ids: TokenIds,
    unnamed: UnnamedSaved,
    upstream: Upstream,
    inverse: Tensor | None,
) -> ScoreFactors:
    """Return the factors of backward; ``inverse`` is the temperatures', 1 where ignored."""
    dlogprob, dlse, dother, dentropy = upstream
    dlse, dother, dentropy = (if_counted(x, unnamed.labels) for x in (dlse, dother, dentropy))
    scale = call.options.logit_scale
    tempered_scale = scale if inverse is None else scale * inverse
    if dother is not None:
        dother = dother.masked_fill(_other_is_constant(unnamed, dother, tempered_scale), 0.0)
        dlse = -dother if dlse is None else dlse - dother
    of_named, sums = call.kernels.set_gradient(
        named.z,
        ids,
        named.logprob,
        named.entropy,
        (dlogprob, dlse, dentropy),
        inverse,
        softcap=call.options.softcap,
        logit_scale=scale,
    )
    dtotal = -sums if dlse is None else dlse - sums
    return ScoreFactors(of_named, dtotal, dother, dentropy, tempered_scale)


def _other_is_constant(
    unnamed: UnnamedSaved, dother: Tensor, tempered_scale: Tensor | float
) -> Tensor:
    """Return where other has no gradient: its sum is 0 or so small that a factor would be inf."""
    U = unnamed.sum_e
    size = torch.maximum(dother.abs(), (dother * tempered_scale).abs())
    overflows = size.isfinite() & (size / U).isinf()
    return overflows | (U < torch.finfo(U.dtype).tiny)  # not where U is NaN


def _affine(
    unnamed: UnnamedSaved, entropy: Tensor | None, factors: ScoreFactors
) -> tuple[Tensor, ...]:
    """Return that of ``RowGradient`` at ids that are not named, by z: with U their ``sum_e``,

    ``dz_v = p_v (dtotal - dH (log p_v + H)) + exp(x_v) dother / U``, where ``log p_v = x_v -
    (log U - other)``.
    """
    has_unnamed = unnamed.sum_e != 0  # also if it is NaN
    U = unnamed.sum_e.where(has_unnamed, 1.0)
    p_scale = unnamed.other.exp() / U  # exp(-log_total); NaN where all ids are banned
    a = factors.dtotal * p_scale
    if factors.dother is not None:
        a = a + factors.dother / U
    if factors.dentropy is None or entropy is None:
        return (a,)
    log_total = (U.log() - unnamed.other).where(has_unnamed, 0.0)
    a = a - factors.dentropy * (entropy - log_total) * p_scale
    return a, -factors.dentropy * p_scale, torch.zeros_like(a)
