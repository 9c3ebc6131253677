"""Scores over the vocabulary where hidden alone needs a gradient, as with a frozen head.

A token's dhidden is a sum over its named ids, and a factor times one vector, the mean of the other
ids' rows of the weight by their probabilities. Forward knows the vector, backward the factors.

T = tokens of the tensor-parallel group, H = hidden size, P = ranks, N = ids of all tokens.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flce_dist.core.call import Call, Operands
from flce_dist.core.gradients import Gradients
from flce_dist.core.hidden_gradient import new_dhidden
from flce_dist.core.interface import Backward, Outputs, Results, Saved
from flce_dist.core.sections import tokens_here, whole
from flce_dist.kernels.ids.token_ids import TokenIds
from flce_dist.kernels.logits.operands import ShardLogits, rows_of
from flce_dist.kernels.rows.formulas import RowGradient, TokenStats
from flce_dist.parallel import collectives
from flce_dist.schedules.in_forward import InForward
from flce_dist.scores.named import NamedSaved, begun_pass, scored
from flce_dist.scores.over_vocabulary import (
    NamedElements,
    UnnamedSaved,
    if_counted,
    name_ids,
    score_factors,
    unnamed_saved,
)


class MeanSaved(NamedTuple):
    """What is saved beside ``NamedSaved`` and ``UnnamedSaved``."""

    mean: Tensor  # [T, H], of this rank's tokens [T / P, H] if hidden is split
    weight: Tensor  # as the next ones those of the operands
    offsets: Tensor
    inverse_temperature: Tensor | None


@dataclass(frozen=True)
class OverVocabularyInForward:
    """Outputs are those of ``OverVocabulary``, without an entropy.

    Forward: two GEMMs of 2 T H V flop, in chunks of tokens. Under sequence parallelism a gather of
    hidden; the all-reduces of ``chunk_loss``; an all-reduce SUM of logits [N]; the sum over ranks
    of the means [T, H].
    Backward: N rows of the weight are added; the sum of these over ranks, as of dhidden.
    """

    chunks: InForward  # what the loss would take

    keeps_operands: ClassVar[bool] = False
    skips_ignored: ClassVar[bool] = True

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Outputs, Saved]:
        forward_pass, ids = begun_pass(call, operands)
        z = name_ids(forward_pass, ids)
        gradients = Gradients(call, operands, None)

        def of_mean(
            stats: TokenStats, logits: ShardLogits, tokens: tuple[int, int]
        ) -> tuple[RowGradient, WithoutNamed]:
            return _mean_rows(stats, from_lse=call.is_fp16), WithoutNamed(call, ids, *tokens)

        sections = [whole(call, operands)]
        chunks = self.chunks.add_chunks(sections, lambda _: forward_pass, gradients, of_mean)
        z = collectives.all_reduce_sum(z, call.tp_group)
        stats = _joined([chunk.stats for chunk in chunks])
        mean, _, _ = gradients.finished()
        assert mean is not None and operands.offsets is not None
        result, outputs, named = scored(call, operands, z, ids, stats)
        unnamed = unnamed_saved(outputs, forward_pass.logits.labels, stats)
        inverse = operands.inverse_temperature
        saved = MeanSaved(mean, operands.weight, operands.offsets, inverse)
        return result, outputs, (*named, *unnamed, *saved)

    def backward(self, request: Backward) -> Results:
        call = request.call
        saved = request.saved
        n = len(NamedSaved._fields)
        m = n + len(UnnamedSaved._fields)
        named = NamedSaved(*saved[:n])
        unnamed = UnnamedSaved(*saved[n:m])
        of_mean = MeanSaved(*saved[m:])
        ids = named.with_offsets(of_mean.offsets)
        inverse = if_counted(of_mean.inverse_temperature, unnamed.labels, 1.0)
        factors = score_factors(call, named, ids, unnamed, request.upstream, inverse)
        # In fp16 a part may pass 65504 where the whole does not.
        of_named = new_dhidden(call, of_mean.weight, in_fp32=call.is_fp16)
        of_named.acquire()
        call.kernels.dhidden_of_ids(
            factors.named,
            ids,
            rows_of(of_mean.weight, 0, call.V),
            vocab_start_index=call.vocab_start_index,
            out=of_named.tokens,
        )
        of_named.start()
        factor = factors.dtotal * unnamed.other.exp()
        if factors.dother is not None:
            factor = factor + factors.dother
        factor = tokens_here(call, factor * factors.tempered_scale)
        out = of_mean.mean if request.is_last else torch.empty_like(of_mean.mean)
        call.kernels.scale_rows(
            of_mean.mean,
            factor,
            tokens_here(call, unnamed.labels),
            ignore_index=-1,
            plus=(torch.ones_like(factor), of_named.wait()),
            out=out,
        )
        return out, None, None


class WithoutNamed(NamedTuple):
    """D of a chunk of tokens, ``first`` to ``last``: 0 at named ids where it is computed again."""

    call: Call
    ids: TokenIds  # of all tokens
    first: int
    last: int

    def write(self, d: Tensor, start: int) -> None:
        ids = self.ids
        here = (ids.token >= self.first) & (ids.token < self.last)
        token = (ids.token - self.first).where(here, 0)
        of_chunk = ids._replace(ids=ids.ids.where(here, -1), token=token)
        zeros = torch.zeros_like(here, dtype=self.call.stats_dtype)
        NamedElements(self.call, of_chunk, zeros).write(d, start)


def _joined(of_chunks: list[TokenStats]) -> TokenStats:
    """Return what scores read of the statistics, of all tokens."""
    return TokenStats(
        label_logit=torch.cat([stats.label_logit for stats in of_chunks]),
        reference=torch.cat([stats.reference for stats in of_chunks]),
        others=torch.cat([stats.others for stats in of_chunks]),
    )


def _mean_rows(stats: TokenStats, *, from_lse: bool) -> RowGradient:
    """Return what makes D exponentials over their sum; of a sum near 0 exponentials themselves."""
    is_near_0 = stats.others < torch.finfo(stats.others.dtype).tiny  # NaN is not
    total = stats.others.masked_fill(is_near_0, 1.0)
    zeros = torch.zeros_like(total)
    if from_lse:
        return RowGradient(None, stats.reference + total.log(), zeros, (), None)
    return RowGradient(total.reciprocal(), stats.reference, zeros, (), None)
