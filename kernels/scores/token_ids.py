"""The ids at which scores are asked for, in the one form that kernels take.

T = tokens, N = ids of all tokens, with padding and repetitions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flce_dist import torch_private


class TokenIds(NamedTuple):
    """Entries (token, id), ascending by token and, of one token, by id; padding comes first.

    Entry n is what the caller has at ``place[n]``.
    """

    ids: Tensor  # [N] int64, -1 is padding
    offsets: Tensor  # [T + 1] int64: the entries of token t are offsets[t] to offsets[t + 1]
    token: Tensor  # [N] int64
    first: Tensor  # [N] bool: False at padding, and where the entry before is the same
    place: Tensor  # [N] int64


class Rest(NamedTuple):
    """Sums over the ids of the vocabulary that a token does not name, [T] fp32 each."""

    reference: Tensor  # what these are relative to
    others: Tensor  # of exponentials
    weighted: Tensor | None  # of exp(x) x, for the entropy


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
