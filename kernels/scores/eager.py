"""Scores in plain PyTorch: the functions of ``gpu.py``, whose docstrings hold here.

T = tokens, V = vocabulary rows here, H = hidden size, N = ids of all tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from flce_dist.kernels import gemm
from flce_dist.kernels.eager_logits import capped
from flce_dist.kernels.scores.token_ids import TokenIds
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_gradient_formulas import softcap_grad


def logits_at_ids(logits: ShardLogits, ids: TokenIds) -> Tensor:
    z = logits.hidden.new_zeros(len(ids.ids), dtype=logits.stats_dtype)
    for n, row in _here(ids, logits.vocab_start_index, logits.weight):
        token = ids.token[n]
        products = logits.hidden[token].to(z.dtype) * logits.weight[row].to(z.dtype)
        dots = products.sum(1) * logits.logit_scale
        if logits.bias is not None:
            dots += logits.bias[row]
        dots = capped(dots, logits.softcap)
        inverse = logits.inverse_temperature
        z[n] = dots if inverse is None else dots * inverse[token]
    return z


def set_scores(
    z: Tensor, ids: TokenIds, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    reference, top, others, entropy = _statistics(z, ids)
    is_counted = top < len(z)
    logprob = (z - reference[ids.token] - others.log1p()[ids.token]).where(ids.ids >= 0, 0.0)
    lse, entropy = (x.where(is_counted, 0.0) for x in (reference + others.log1p(), entropy))
    return (
        torch.empty_like(z).scatter_(0, ids.place, logprob),
        lse,
        entropy if with_entropy else None,
    )


def set_gradient(
    z: Tensor,
    ids: TokenIds,
    dlogprob: Tensor | None,
    dlse: Tensor | None,
    dentropy: Tensor | None,
    inverse_temperature: Tensor | None,
    *,
    softcap: float | None,
    logit_scale: float,
) -> Tensor:
    token, is_id = ids.token, ids.ids >= 0
    reference, top, others, entropy = _statistics(z, ids)
    logprob = z - reference[token] - others.log1p()[token]
    p = logprob.exp().where(ids.first, 0.0)
    dz = torch.zeros_like(z)
    if dlse is not None:
        dz += p * dlse[token]
    if dentropy is not None:
        surprise = (logprob + entropy[token]).where(p != 0, 0.0)
        dz -= p * surprise * dentropy[token]
    if dlogprob is not None:
        g = dlogprob[ids.place].where(is_id, 0.0)
        is_top = _is_top(top, ids)
        sums = g.new_zeros(2, len(top))
        sums[0].index_add_(0, token, g.where(is_top, 0.0))
        sums[1].index_add_(0, token, g.where(~is_top, 0.0))
        g = g.where(~is_top, g * (others / (1 + others))[token])
        dz += g - p * sums[1][token].where(is_top, sums.sum(0)[token])
    inverse = None if inverse_temperature is None else inverse_temperature[token]
    dz *= softcap_grad(z, softcap, inverse) * logit_scale
    return (dz if inverse is None else dz * inverse).where(is_id, 0.0)


def _statistics(z: Tensor, ids: TokenIds) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return r, the top entry (N without ids), S and entropy of each token's set, [T]."""
    T, N = len(ids.offsets) - 1, len(z)
    in_set = z.where(ids.first, -torch.inf)
    reference = z.new_full((T,), -torch.inf).scatter_reduce_(0, ids.token, in_set, "amax")
    n = torch.arange(N, device=z.device)
    is_largest = ids.first & (in_set == reference[ids.token])
    top = ids.token.new_full((T,), N)
    top.scatter_reduce_(0, ids.token, n.where(is_largest, N), "amin")
    x = z - reference[ids.token]
    is_other = ids.first & ~_is_top(top, ids)
    e = x.exp().where(is_other, 0.0)
    others = torch.zeros_like(reference).index_add_(0, ids.token, e)
    weighted = torch.zeros_like(others).index_add_(0, ids.token, (e * x).where(e != 0, 0.0))
    return reference, top, others, others.log1p() - weighted / (1 + others)


def _is_top(top: Tensor, ids: TokenIds) -> Tensor:
    return top[ids.token] == torch.arange(len(ids.ids), device=top.device)


def dhidden_of_ids(
    factor: Tensor, ids: TokenIds, weight: Tensor, *, vocab_start_index: int, out: Tensor
) -> None:
    acc = torch.zeros_like(out, dtype=factor.dtype)
    for n, row in _here(ids, vocab_start_index, weight):
        acc.index_add_(0, ids.token[n], factor[n, None] * weight[row].to(acc.dtype))
    out.copy_(acc)


def dweight_of_ids(
    factor: Tensor,
    ids: TokenIds,
    hidden: Tensor,
    order: Tensor,
    *,
    vocab_start_index: int,
    out: Tensor,
    adds: bool,
) -> None:
    here = torch.zeros(len(out), dtype=torch.bool, device=out.device)
    for _, row in _here(ids, vocab_start_index, out):
        here[row] = True
    rows = here.nonzero().squeeze(1)
    slot = here.cumsum(0) - 1
    acc = out[rows].to(factor.dtype) if adds else factor.new_zeros(len(rows), out.shape[1])
    for n, row in _here(ids, vocab_start_index, out):
        acc.index_add_(0, slot[row], factor[n, None] * hidden[ids.token[n]].to(acc.dtype))
    out[rows] = acc.to(out.dtype)


def _here(ids: TokenIds, vocab_start_index: int, weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield entries whose rows are those of weight [V, H], and these rows, a slice at a time."""
    row = ids.ids - vocab_start_index
    n = ((row >= 0) & (row < len(weight)) & (ids.ids >= 0)).nonzero().squeeze(1)
    for part in gemm.slices(len(n), 8 * weight.shape[1]):
        yield n[part], row[n[part]]
