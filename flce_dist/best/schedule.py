"""The pass of best ids and samples: forward alone.

T = tokens of the tensor-parallel group, V = real vocabulary rows here, k = ids of a token, P ranks.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flce_dist.arguments.prepare import counted_operands
from flce_dist.core.call import Call, Operands, Outputs, Saved
from flce_dist.core.statistics import gathered_logits
from flce_dist.kernels.best.interface import Noise, ShardBest, kernels_of
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.parallel import collectives
from flce_dist.parallel.counted import put_back


@dataclass(frozen=True)
class TopK:
    """The first output is lse; the others are ids, logprob, and the label's logprob and rank.

    Collectives: under sequence parallelism a gather of hidden; with labels a SUM of their logits
    [T]; MAX of the largest logits [T]; SUM of 2 rows [T] fp64 (eager: 1, in stats_dtype); with
    labels a SUM of ranks [T] int64; with k a gather of keys [T, k] int64 (eager: 2 k).
    """

    k: int  # 0: no ids
    top_p: float | None
    with_labels: bool

    def operands(self, call: Call, operands: Operands) -> Operands:
        """Return the operands with labels that are checked; 0 of each token without labels."""
        if not self.with_labels:
            operands = operands._replace(labels=torch.zeros_like(operands.labels))
        return counted_operands(call, operands)

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Outputs, Saved]:
        kernels = kernels_of(call.impl)
        group = call.tp_group
        logits, counted = _gathered(call, operands)
        label_logit = None
        if self.with_labels:
            label_logit = _label_logits(call, logits)
        best = kernels.best_of_shard(logits, k=self.k, label_logit=label_logit, noise=None)
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
        others = (ids, -1), (logprob, -math.inf), (label_logprob, 0), (label_rank, -1)
        places = operands.places
        behind = (
            None if x is None else put_back(x, places, call.T_all, fill) for x, fill in others
        )
        return put_back(lse, places, call.T_all), tuple(behind), ()


@dataclass(frozen=True)
class Sample:
    """The outputs are logprob and ids. ``operands.labels`` are the counters of draws.

    Collectives: as of ``TopK`` with k = 1 and without labels; then a SUM of the ids' logits [T].
    """

    seed: int

    def operands(self, call: Call, operands: Operands) -> Operands:
        return operands

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Outputs, Saved]:
        kernels = kernels_of(call.impl)
        noise = Noise(self.seed, operands.labels)
        logits, counted = _gathered(
            call, operands._replace(labels=torch.zeros_like(noise.counters))
        )
        best = kernels.best_of_shard(logits, k=1, label_logit=None, noise=noise)
        lse = merged_lse(call, best)
        assert best.pairs is not None
        ids = merged_ids(call, best.pairs, lse, counted, k=1, top_p=None)[0][:, 0]
        is_id = ids >= 0
        logits = logits._replace(labels=ids.where(is_id, call.options.ignore_index))
        logprob = (
            (_label_logits(call, logits).double() - lse)
            .clamp_max(0.0)
            .where(is_id | lse.isnan(), -torch.inf)
        )
        return logprob.to(call.stats_dtype), (ids,), ()


def _gathered(call: Call, operands: Operands) -> tuple[ShardLogits, Tensor]:
    """Return this shard's logits of all tokens, and which of these count."""
    gather, logits = gathered_logits(call, operands)
    gather.start()
    gather.wait()
    return logits, logits.counted


def _label_logits(call: Call, logits: ShardLogits) -> Tensor:
    """Return the logits of labels [T], the same on every rank."""
    mine = kernels_of(call.impl).label_logits(logits, vocab_size=call.vocab_size)
    return collectives.all_reduce_sum(mine, call.tp_group)


def merged_lse(call: Call, best: ShardBest) -> Tensor:
    """Return lse [T] fp64 over the whole vocabulary, the same bits on every rank."""
    kernels = kernels_of(call.impl)
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
    ids, logprob = kernels_of(call.impl).merged_ids(of_ranks, lse, counted, k=k, top_p=top_p)
    return ids, logprob.to(call.stats_dtype)
