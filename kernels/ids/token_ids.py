"""The ids at which scores are asked for, in the one form that kernels take.

T = tokens, N = ids of all tokens, with padding and repetitions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_NO_ROW = 2**31 - 1  # above all ids


class TokenIds(NamedTuple):
    """Entries (token, id), ascending by token and, of one token, by id; padding comes first.

    Entry n is what the caller has at ``place[n]``.
    """

    ids: Tensor  # [N] int64, below 2^31, -1 is padding
    offsets: Tensor  # [T + 1] int64: the entries of token t are offsets[t] to offsets[t + 1]
    token: Tensor  # [N] int64
    place: Tensor  # [N] int64


class IdEntries(NamedTuple):
    """Entries with a factor, ascending by id, those of one id in their order; then the others."""

    ids: Tensor  # [N] int32, _NO_ROW at the others
    token: Tensor  # [N] int64
    factor: Tensor  # [N] fp32, 0 at the others


def are_first(ids: Tensor, token: Tensor) -> Tensor:
    """Return [N] bool: False at padding, and where the entry before is the same."""
    first = ids >= 0
    first[1:].logical_and_((ids[1:] != ids[:-1]) | (token[1:] != token[:-1]))
    return first


def sorted_ids(ids: Tensor, offsets: Tensor, vocab_size: int) -> TokenIds:
    """Sort ids int64 of tokens in order: [T, K], or [N], token t's from offsets[t] on."""
    ids = ids.view(-1)
    n = torch.arange(len(ids), device=ids.device)
    token = torch.searchsorted(offsets, n, right=True).sub_(1)
    key = torch.add(ids, token, alpha=vocab_size + 1)  # -1 takes the place behind the token before
    is_short = len(offsets) * (vocab_size + 1) < 1 << 31
    place = torch.sort(key.int() if is_short else key, stable=True).indices
    return TokenIds(ids.index_select(0, place), offsets, token, place)


def entries_by_id(ids: TokenIds, factor: Tensor) -> IdEntries:
    """Sort entries, each with its factor [N], by id; those with factor 0 come last, at no row."""
    key, order = torch.sort(ids.ids.int().masked_fill_(factor == 0.0, _NO_ROW), stable=True)
    return IdEntries(key, *(x.index_select(0, order) for x in (ids.token, factor)))


def are_cut(ids: Tensor, offsets: Tensor) -> Tensor:
    """Return whether offsets [T + 1] cut all ids, a bool scalar."""
    return (offsets[0] == 0) & (offsets[-1] == ids.numel()) & (offsets.diff() >= 0).all()
