"""Scores in plain PyTorch: those of ``kernels/gpu.py``, whose docstrings hold here.

T = tokens, V = vocabulary rows here, H = hidden size, N = ids of all tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from flce_dist.kernels import gemm
from flce_dist.kernels.ids.token_ids import IdEntries, TokenIds, are_first
from flce_dist.kernels.rows.formulas import FAR, TokenStats, finite, softcap_slope
from flce_dist.torch_private.devices import assert_soon


def set_scores(
    z: Tensor, ids: TokenIds, unnamed: TokenStats | None, *, vocab_size: int, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    if z.is_cuda:  # on a CPU the host has checked them
        is_known = (ids.ids >= -1) & (ids.ids < vocab_size)
        assert_soon(is_known.all(), f"ids must be within [0, {vocab_size}), or -1 for padding")
    T = len(ids.offsets) - 1
    N = len(z)
    token = ids.token
    first = are_first(ids.ids, token)
    in_set = z.where(first, -torch.inf)
    n = torch.arange(N, device=z.device)
    largest = z.new_full((T,), -torch.inf).scatter_reduce_(0, token, in_set, "amax")
    entry = n.where(first & (in_set == largest[token]), N)
    top = token.new_full((T,), N).scatter_reduce_(0, token, entry, "amin")  # N without ids
    reference = largest
    if unnamed is not None:  # without any, largest may lie far below their reference
        of_unnamed = unnamed.reference.where(unnamed.others != 0, largest)
        reference = torch.maximum(largest, of_unnamed)
    reference = finite(reference)
    e_top = (largest - reference).exp()
    x = z - reference[token]
    e = x.exp().where(first, 0.0)
    named, weighted = torch.zeros(2, T, dtype=z.dtype, device=z.device)
    named.index_add_(0, token, e.where(n != top[token], 0.0))
    weighted.index_add_(0, token, (e * x).where(e != 0, 0.0))
    sum_unnamed = torch.zeros_like(named)
    if unnamed is not None:
        change = of_unnamed - reference
        sum_unnamed = unnamed.others * change.exp()
        log_unnamed = unnamed.others.log() + change
        if unnamed.sum_ez is not None:
            weighted += change.exp() * unnamed.sum_ez + sum_unnamed * change
    others = named + sum_unnamed
    below = (others + (e_top - 1)).log1p()
    is_counted = torch.zeros_like(largest).index_add_(0, token, first.to(z.dtype)) > 0
    logprob = (x - below[token]).where(ids.ids >= 0, 0.0)
    other = entropy = None
    if unnamed is not None:
        near_0 = -((named + e_top) / sum_unnamed).log1p()
        other = near_0.where(sum_unnamed > named + e_top, log_unnamed - below)
        other = other.where(is_counted, 0.0)
    if with_entropy:
        entropy = (below - weighted / (e_top + others)).where(is_counted, 0.0)
    lse = (reference + below).where(is_counted, 0.0)
    return torch.empty_like(z).scatter_(0, ids.place, logprob), lse, other, entropy


def set_gradient(
    z: Tensor, ids: TokenIds, logprob: Tensor, entropy: Tensor | None,
    upstream: tuple[Tensor | None, Tensor | None, Tensor | None],
    inverse_temperature: Tensor | None, *, softcap: float | None, logit_scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    def of_entries(x: Tensor) -> Tensor:
        return x.index_select(0, ids.token)

    dlogprob, dlse, dentropy = upstream
    logprob = logprob.index_select(0, ids.place)
    first = are_first(ids.ids, ids.token)
    p = logprob.exp().where(first, 0.0)
    dz = torch.zeros_like(z)
    sums = z.new_zeros(len(ids.offsets) - 1)
    if dlse is not None:
        dz += p * of_entries(dlse)
    if dentropy is not None and entropy is not None:
        dz -= p * (logprob.clamp_min(FAR) + of_entries(entropy)) * of_entries(dentropy)
    if dlogprob is not None and len(z):
        g = dlogprob.reshape(-1).index_select(0, ids.place).where(ids.ids >= 0, 0.0)
        sums = torch.segment_reduce(g, "sum", offsets=ids.offsets, unsafe=True, initial=0)
        run = (first.cumsum(0) - 1).clamp_min(0)  # padding, whose g is 0, comes first in its row
        g = torch.zeros_like(g).index_add_(0, run, g)[run]
        total = of_entries(sums)
        dz += (g - p * total).where(p <= 0.5, g - total - logprob.expm1() * total)
    inverse = None if inverse_temperature is None else of_entries(inverse_temperature)
    dz *= softcap_slope(z, softcap, inverse) * logit_scale
    return (dz if inverse is None else dz * inverse).where(first, 0.0), sums


def write_first(
    out: Tensor, ids: Tensor, token: Tensor, value: Tensor, vocab_start_index: int
) -> None:
    first = are_first(ids, token)
    for n, column in _here(ids.where(first, -1), vocab_start_index, out.T):
        out[token[n], column] = value[n].to(out.dtype)


def dhidden_of_ids(
    factor: Tensor, ids: TokenIds, weight: Tensor, *, vocab_start_index: int, out: Tensor
) -> None:
    acc = torch.zeros_like(out, dtype=factor.dtype)
    for n, row in _here(ids.ids.where(factor != 0.0, -1), vocab_start_index, weight):
        acc.index_add_(0, ids.token[n], factor[n, None] * weight[row].to(acc.dtype))
    out.copy_(acc)


def dweight_of_ids(
    entries: IdEntries, hidden: Tensor, *, vocab_start_index: int, out: Tensor, adds: bool
) -> None:
    ids, token, factor = entries
    acc = out.to(factor.dtype) if adds else torch.zeros_like(out, dtype=factor.dtype)
    for n, row in _here(ids, vocab_start_index, out):
        acc.index_add_(0, row, factor[n, None] * hidden[token[n]].to(acc.dtype))
    out.copy_(acc)


def _here(ids: Tensor, vocab_start_index: int, weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield entries whose rows are those of weight [V, H], and these rows, a slice at a time."""
    row = ids - vocab_start_index
    n = ((row >= 0) & (row < len(weight))).nonzero().squeeze(1)
    for part in gemm.slices(len(n), 8 * weight.shape[1]):
        yield n[part], row[n[part]]
