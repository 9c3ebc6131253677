"""The ids at which scores are asked for, in the one form that kernels take, and their gradient.

T = tokens, N = ids of all tokens, with padding and repetitions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flce_dist import torch_private
from flce_dist.kernels.token_gradient_formulas import softcap_grad
from flce_dist.kernels.token_loss_formulas import FAR


class TokenIds(NamedTuple):
    """Entries (token, id), ascending by token and, of one token, by id; padding comes first.

    Entry n is what the caller has at ``place[n]``.
    """

    ids: Tensor  # [N] int64, -1 is padding
    offsets: Tensor  # [T + 1] int64: the entries of token t are offsets[t] to offsets[t + 1]
    token: Tensor  # [N] int64
    first: Tensor  # [N] bool: False at padding, and where the entry before is the same
    place: Tensor  # [N] int64


def sorted_ids(ids: Tensor, offsets: Tensor, vocab_size: int) -> TokenIds:
    """Sort ids [N] int64 of tokens in order, those of token t from offsets[t] to offsets[t + 1].

    One sort of N keys; nothing is read on the host. On a GPU ids beyond the vocabulary of all ranks
    (below 2^31), or offsets that do not cut them, fail an assertion, whose error arrives with the
    next synchronisation.
    """
    T, N = len(offsets) - 1, len(ids)
    n = torch.arange(N, device=ids.device)
    token = torch.searchsorted(offsets, n, right=True).sub_(1).clamp_(0, max(0, T - 1))
    key, place = torch.sort((token << 32) + (ids + 1))
    if ids.is_cuda:
        known = (ids >= -1) & (ids < vocab_size)
        torch_private.assert_soon(known.all(), "ids must be within [0, vocab_size), or -1")
        torch_private.assert_soon(are_cut(ids, offsets), "offsets must rise from 0 to all ids")
    ids = ids.index_select(0, place)
    first = ids >= 0
    first[1:].logical_and_(key[1:] != key[:-1])
    return TokenIds(ids, offsets, token, first, place)


def are_cut(ids: Tensor, offsets: Tensor) -> Tensor:
    """Return whether offsets [T + 1] cut ids [N], a bool scalar."""
    return (offsets[0] == 0) & (offsets[-1] == len(ids)) & (offsets.diff() >= 0).all()


def set_gradient(
    z: Tensor, ids: TokenIds, logprob: Tensor, entropy: Tensor | None,
    upstream: tuple[Tensor | None, Tensor | None, Tensor | None],
    inverse_temperature: Tensor | None, *, softcap: float | None, logit_scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return [N]: the gradient of each entry's product ``h . w``, 0 at padding; and G [T].

    Passes over [N] in PyTorch, for both implementations. upstream are gradients of logprob [N] in
    the caller's order, lse [T] and entropy [T]. With g_n those of logprob, G their sum over the
    token and H the entropy::

        dz_n = g_n + p_n (dlse - G - dH (logprob_n + H))

    An entry that repeats an id has g_n, but no p_n: the set has each id once. Where p_n is near 1,
    1 - p_n keeps its relative precision.
    """

    def each(x: Tensor) -> Tensor:
        return x.index_select(0, ids.token)

    dlogprob, dlse, dentropy = upstream
    logprob = logprob.index_select(0, ids.place)
    p = logprob.exp().where(ids.first, 0.0)
    dz, sums = torch.zeros_like(z), z.new_zeros(len(ids.offsets) - 1)
    if dlse is not None:
        dz += p * each(dlse)
    if dentropy is not None and entropy is not None:
        dz -= p * (logprob.clamp_min(FAR) + each(entropy)) * each(dentropy)
    if dlogprob is not None and len(z):
        g = dlogprob.index_select(0, ids.place).where(ids.ids >= 0, 0.0)
        sums = torch.segment_reduce(g, "sum", offsets=ids.offsets, unsafe=True, initial=0)
        total = each(sums)
        dz += (g - p * total).where(p <= 0.5, g - total - logprob.expm1() * total)
    inverse = None if inverse_temperature is None else each(inverse_temperature)
    dz *= softcap_grad(z, softcap, inverse) * logit_scale
    return (dz if inverse is None else dz * inverse).where(ids.ids >= 0, 0.0), sums
