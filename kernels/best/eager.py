"""The functions of ``gpu.py``, whose docstrings hold here, in plain PyTorch, also in fp64.

All logits of a few tokens exist at a time. T = tokens, V = vocabulary rows here, P = ranks.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from flce_dist.kernels.best.interface import Noise, ShardBest
from flce_dist.kernels.best.noise import eager_gumbel
from flce_dist.kernels.logits.eager import (
    SCRATCH_BYTES,
    assert_in_vocabulary,
    windows,
)
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.rows.formulas import finite


def _chunks(logits: ShardLogits) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of tokens and their logits [t, V], in ignored rows those of ``windows``."""
    step = max(1, SCRATCH_BYTES // (4 * max(1, logits.V)))
    for start in range(0, logits.T, step):
        tokens = slice(start, min(start + step, logits.T))
        parts = [z for _, z in windows(logits.tokens(tokens.start, tokens.stop))]
        empty = logits.hidden.new_empty(tokens.stop - start, 0, dtype=logits.stats_dtype)
        yield tokens, torch.cat([empty, *parts], 1)


def label_logits(logits: ShardLogits, *, vocab_size: int) -> Tensor:
    if logits.labels.is_cuda:
        assert_in_vocabulary(logits.labels, logits.counted, vocab_size)
    column = logits.labels - logits.vocab_start_index
    is_here = (column >= 0) & (column < logits.V) & logits.counted
    out = torch.zeros(logits.T, dtype=logits.stats_dtype, device=column.device)
    for tokens, z in _chunks(logits):
        if z.shape[1]:
            place = column[tokens].where(is_here[tokens], 0)[:, None]
            out[tokens] = z.gather(1, place)[:, 0].where(is_here[tokens], 0.0)
    return out


def best_of_shard(
    logits: ShardLogits, *, k: int, label_logit: Tensor | None, noise: Noise | None
) -> ShardBest:
    T = logits.T
    V = logits.V
    first_id = logits.vocab_start_index
    device = logits.hidden.device
    largest = torch.full((T,), -torch.inf, dtype=logits.stats_dtype, device=device)
    sums = torch.zeros(1, T, dtype=logits.stats_dtype, device=device)
    above = None if label_logit is None else logits.labels.new_zeros(T)
    pairs = logits.labels.new_empty(T, 2 * k) if k else None
    column = torch.arange(V, device=device)
    for tokens, z in _chunks(logits):
        if V:
            largest[tokens] = z.amax(1)
            sums[0, tokens] = (z - finite(largest[tokens])[:, None]).exp().sum(1)
        if above is not None and label_logit is not None:
            of_label = label_logit[tokens, None]
            label = logits.labels[tokens, None] - first_id
            above[tokens] = ((z > of_label) | ((z == of_label) & (column < label))).sum(1)
        if pairs is not None:
            if noise is not None:
                of_ids = eager_gumbel(noise.seed, noise.counters[tokens], first_id, V)
                z = z + of_ids.to(z.dtype)
            value, place = z.sort(dim=1, descending=True, stable=True)
            pairs[tokens] = _packed(value[:, :k], (place + first_id)[:, :k], k)
    return ShardBest(largest, sums, above, pairs)


def _packed(value: Tensor, id: Tensor, k: int) -> Tensor:
    """Return [t, 2 k] int64: the bits of k values in fp64, -inf where there are fewer, and ids."""
    missing = (0, k - value.shape[1])
    value = torch.nn.functional.pad(value.double(), missing, value=-torch.inf)
    id = torch.nn.functional.pad(id, missing, value=-1)
    return torch.cat([value.view(torch.int64), id], 1)


def relative_to(largest: Tensor, of_all: Tensor, sums: Tensor) -> None:
    sums.mul_((largest - finite(of_all)).exp())


def merged_lse(largest: Tensor, sums: Tensor) -> Tensor:
    return finite(largest).double() + sums[0].double().log()


def merged_ids(
    pairs: Tensor, lse: Tensor, counted: Tensor, *, k: int, top_p: float | None
) -> tuple[Tensor, Tensor]:
    """Here pairs are [P, T, 2 k], as ``_packed`` makes them, and logprob is fp64."""
    # Ranks are in the order of their ids, so that a stable sort leaves the smaller of equal ones.
    value, id = (x.transpose(0, 1).flatten(1) for x in pairs.split(k, dim=2))
    value = value.contiguous().view(torch.float64)
    value, order = value.sort(dim=1, descending=True, stable=True)
    value = value[:, :k]
    id = id.gather(1, order)[:, :k]
    is_id = (value > -torch.inf) & (counted & ~lse.isnan())[:, None]
    logprob = (value - lse[:, None]).clamp_max(0.0).where(is_id, -torch.inf)
    if top_p is not None:
        mass = logprob.exp().cumsum(1)
        kept = 1 + (is_id & (mass < top_p)).sum(1, keepdim=True)
        is_id &= torch.arange(k, device=id.device) < kept
        logprob = logprob.where(is_id, -torch.inf)
    logprob = logprob.masked_fill((counted & lse.isnan())[:, None], torch.nan)
    return id.where(is_id, -1), logprob
