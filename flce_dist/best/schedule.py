"""The pass of best ids and samples: forward alone.

T = tokens of the tensor-parallel group, V = real vocabulary rows here, k = ids of a token, P ranks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flce_dist.arguments.prepare import check_temperatures, counted_operands
from flce_dist.core.call import Call, Operands, gathered_logits
from flce_dist.core.interface import Outputs, Saved
from flce_dist.core.sections import Section, joined, sections_of, with_next
from flce_dist.kernels.best.chunks import chunk_tokens
from flce_dist.kernels.best.interface import Noise, ShardBest, best_kernels_of
from flce_dist.kernels.grid import PLANNED
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.parallel import collectives
from flce_dist.parallel.counted import put_back
from flce_dist.parallel.vocab import INVARIANT_ROWS
from flce_dist.schedules.windows import Sizes


@dataclass(frozen=True)
class TopK:
    """The first output is lse; the others are ids, logprob, and the label's logprob and rank.

    Collectives: for each section under sequence parallelism a gather of hidden, in flight while the
    one before is computed, and with labels a SUM of their logits. Then, of all tokens, MAX of the
    largest logits [T]; SUM of 2 rows [T] fp64 (eager: 1, in stats_dtype); with k a gather of keys
    [T, k] int64 (eager: 2 k); with labels a SUM of ranks [T] int64.
    """

    k: int  # 0: no ids
    top_p: float | None
    with_labels: bool
    section_t: int = field(default=0, repr=False)  # tokens of a section; ``sized`` says

    def sized(self, call: Call) -> "TopK":
        section_t = _section_tokens(call, self.k, counts=self.with_labels)
        return replace(self, section_t=section_t)

    def operands(self, call: Call, operands: Operands) -> Operands:
        """Return the operands with labels that are checked; 0 of each token without labels."""
        if not self.with_labels:
            operands = operands._replace(labels=torch.zeros_like(operands.labels))
        operands = counted_operands(call, operands)
        counted = operands.labels != call.options.ignore_index
        check_temperatures(operands.inverse_temperature, counted)
        return operands

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Outputs, Saved]:
        kernels = best_kernels_of(call.impl)
        group = call.tp_group
        counted = operands.labels != call.options.ignore_index
        sections = sections_of(call, operands, (self.section_t,))
        of_shard = []
        of_labels = []
        for section, logits in _gathered(sections):
            of_label = _label_logits(section.call, logits) if self.with_labels else None
            of_labels.append(of_label)
            of_shard.append(
                kernels.best_of_shard(logits, k=self.k, label_logit=of_label, noise=None)
            )
        best = _in_order(of_shard, sections)
        label_logit = _joined(of_labels, sections)
        lse = merged_lse(call, best)
        ids = logprob = label_logprob = label_rank = None
        if best.pairs is not None:
            ids, logprob = merged_ids(call, best.pairs, lse, counted, k=self.k, top_p=self.top_p)
        if label_logit is not None and best.above is not None:
            label_rank = collectives.all_reduce_sum(best.above, group)
            label_rank = label_rank.where(counted & ~lse.isnan(), -1)
            label_logprob = (label_logit.double() - lse).clamp_max(0.0).where(counted, 0.0)
            label_logprob = label_logprob.to(call.stats_dtype)
        lse = lse.where(counted, 0.0).to(call.stats_dtype)
        places = operands.places
        # Each with what tokens have that are not computed.
        filled = (ids, -1), (logprob, -math.inf), (label_logprob, 0), (label_rank, -1)
        outputs = (
            None if x is None else put_back(x, places, call.T_all, fill) for x, fill in filled
        )
        return put_back(lse, places, call.T_all), tuple(outputs), ()


@dataclass(frozen=True)
class Sample:
    """The outputs are logprob and ids. ``operands.labels`` are the counters of draws.

    Collectives for each section: as of ``TopK`` with k = 1 and without labels; then a SUM of the
    ids' logits.
    """

    seed: int
    section_t: int = field(default=0, repr=False)

    def sized(self, call: Call) -> "Sample":
        return replace(self, section_t=_section_tokens(call, 1, counts=False))

    def operands(self, call: Call, operands: Operands) -> Operands:
        every_token = torch.ones_like(operands.labels, dtype=torch.bool)
        check_temperatures(operands.inverse_temperature, every_token)
        return operands

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Outputs, Saved]:
        sections = sections_of(call, operands, (self.section_t,))
        drawn = [self._draw(section.call, logits) for section, logits in _gathered(sections)]
        logprob, ids = (joined(x, sections[0].parts) for x in zip(*drawn, strict=True))
        return logprob, (ids,), ()

    def _draw(self, call: Call, logits: ShardLogits) -> tuple[Tensor, Tensor]:
        """Return logprob and ids of the section whose labels are counters."""
        noise = Noise(self.seed, logits.labels)
        logits = logits._replace(labels=torch.zeros_like(noise.counters))
        best = best_kernels_of(call.impl).best_of_shard(logits, k=1, label_logit=None, noise=noise)
        lse = merged_lse(call, best)
        assert best.pairs is not None
        best_ids, _ = merged_ids(call, best.pairs, lse, logits.counted, k=1, top_p=None)
        ids = best_ids[:, 0]
        is_id = ids >= 0
        logits = logits._replace(labels=ids.where(is_id, call.options.ignore_index))
        logprob = (
            (_label_logits(call, logits).double() - lse)
            .clamp_max(0.0)
            .where(is_id | lse.isnan(), -torch.inf)
        )
        return logprob.to(call.stats_dtype), ids


def _section_tokens(call: Call, k: int, *, counts: bool) -> int:
    """Return tokens of a section, from facts that all ranks share: what one launch takes."""
    shared = call.schedule  # planned for the largest even shard
    assert isinstance(shared, Sizes)
    groups = PLANNED.tile_v // INVARIANT_ROWS if call.options.tp_invariant else 1
    grid = PLANNED._replace(groups=groups)
    return chunk_tokens(call.T, shared.V, k, counts=counts, grid=grid)


def _gathered(sections: list[Section]) -> Iterator[tuple[Section, ShardLogits]]:
    """Yield this shard's logits of each section, while the next one's hidden states travel."""
    upcoming = _begun(sections[0])
    for section, following in with_next(sections):
        gather, logits = upcoming
        gather.wait()
        if following is not None:
            upcoming = _begun(following)
        yield section, logits


def _begun(section: Section) -> tuple[collectives.TokenGather, ShardLogits]:
    gather, logits = gathered_logits(section.call, section.operands)
    gather.start(beside=section.is_later)
    return gather, logits


def _in_order(of_shard: list[ShardBest], sections: list[Section]) -> ShardBest:
    """Return what the passes leave of all tokens, in their order."""
    if len(of_shard) == 1:
        return of_shard[0]
    parts = sections[0].parts
    sums = joined([best.sums.T for best in of_shard], parts).T.contiguous()
    return ShardBest(
        joined([best.largest for best in of_shard], parts),
        sums,
        _joined([best.above for best in of_shard], sections),
        _joined([best.pairs for best in of_shard], sections),
    )


def _joined(of_sections: list[Tensor | None], sections: list[Section]) -> Tensor | None:
    present = [x for x in of_sections if x is not None]
    if len(of_sections) == 1 or not present:
        return of_sections[0]
    return joined(present, sections[0].parts)


def _label_logits(call: Call, logits: ShardLogits) -> Tensor:
    """Return the logits of labels [T], the same on every rank."""
    mine = best_kernels_of(call.impl).label_logits(logits, vocab_size=call.vocab_size)
    return collectives.all_reduce_sum(mine, call.tp_group)


def merged_lse(call: Call, best: ShardBest) -> Tensor:
    """Return lse [T] fp64 over the whole vocabulary, the same bits on every rank."""
    kernels = best_kernels_of(call.impl)
    group = call.tp_group
    of_all = best.largest
    if group is not None:
        of_all = collectives.all_reduce_max(best.largest.clone(), group)
        kernels.relative_to(best.largest, of_all, best.sums)
        collectives.all_reduce_sum(best.sums, group)
    return kernels.merged_lse(of_all, best.sums)


def merged_ids(
    call: Call, pairs: Tensor, lse: Tensor, counted: Tensor, *, k: int, top_p: float | None
) -> tuple[Tensor, Tensor]:
    """Return ids [T, k] and logprob [T, k] of all ranks from those of each."""
    T, n = pairs.shape
    gathered = collectives.gather_tokens(pairs, call.tp_group)
    of_ranks = gathered.view(collectives.group_size(call.tp_group), T, n)
    ids, logprob = best_kernels_of(call.impl).merged_ids(of_ranks, lse, counted, k=k, top_p=top_p)
    return ids, logprob.to(call.stats_dtype)
