"""Rows of the output layer in an order of their own.  V_all = vocabulary, P = ranks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flce_dist.kernels.filtered.tiles import TILE_V
from flce_dist.op.dtensor import in_kind

SHARDS = 64  # an order gives equal work to P ranks if P divides this
MAP = "row_of_token"  # the layer's buffer, and so its tensor in checkpoints


class VocabOrder(NamedTuple):
    """A permutation of the vocabulary and its inverse, each [V_all] int64 on the CPU."""

    token_of_row: Tensor
    row_of_token: Tensor


def frequency_order(counts: Tensor, *, padded_vocab_size: int | None = None) -> VocabOrder:
    """Return the order that puts tokens of like frequency into the same tile of 256 rows.

    Tokens are sorted by count (equal ones by id) and cut into tiles, which are dealt to 64 shards
    of the rows, so that ranks have as many frequent tiles as each other, or one more, and take
    turns in who gets the more frequent one. Inside a shard frequent tiles come first.

    The rarest ``V_all % 256`` tokens are the last rows. If a rank does not hold a multiple of 256
    rows, its tiles consist of two neighbours, and more are kept.

    Args:
        counts: [V_all] of any real dtype, how often each token occurs; none negative. Only its
            order matters.
        padded_vocab_size: rows of the whole weight if they are more than V_all; they determine
            which tiles lie on one rank. The order itself is of V_all rows: padding stays last.
    """
    if not isinstance(counts, Tensor):
        raise ValueError(f"counts must be a tensor [V_all], got {type(counts).__name__}")
    if counts.dim() != 1 or not counts.numel():
        raise ValueError(f"counts must be [V_all], got {tuple(counts.shape)}")
    if counts.is_complex() or counts.isnan().any():
        raise ValueError(f"counts must be real numbers, got {counts.dtype} or NaN among them")
    if (counts < 0).any():
        raise ValueError(f"counts must be at least 0, got {counts.min().item()}")
    V_all = len(counts)
    rows = V_all if padded_vocab_size is None else padded_vocab_size
    if rows < V_all:
        raise ValueError(f"padded_vocab_size must be at least V_all = {V_all}, got {rows}")
    tokens = counts.cpu().argsort(descending=True, stable=True)
    whole = V_all - V_all % TILE_V
    token_of_row = tokens.clone()
    places = torch.tensor(_dealt(whole // TILE_V, rows), dtype=torch.long, device="cpu")
    token_of_row[:whole].view(-1, TILE_V)[places] = tokens[:whole].view(-1, TILE_V)
    return as_vocab_order(token_of_row, V_all)


def _dealt(tiles: int, rows: int) -> list[int]:
    """Return the places of ``tiles`` tiles, in the order in which they are dealt."""
    shard_rows = -(-rows // SHARDS)
    places: list[list[int]] = [[] for _ in range(SHARDS)]
    for place in range(tiles):
        places[(place * TILE_V + TILE_V // 2) // shard_rows].append(place)
    dealt = []
    for number in range(SHARDS * max(map(len, places))):
        # The halves of the shards take turns by the Thue-Morse sequence; so do the halves of each.
        shard = 0
        for level in range(SHARDS.bit_length() - 1):
            shard = 2 * shard + (number >> level).bit_count() % 2
        dealt += places[shard][number // SHARDS :][:1]
    return dealt


def as_vocab_order(order: VocabOrder | Tensor, vocab_size: int) -> VocabOrder:
    """Return ``order``, of which the tokens of its rows are enough, if it is a permutation."""
    tokens: Any = order.token_of_row if isinstance(order, VocabOrder) else order
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"vocab_order must be a VocabOrder or an int64 tensor, got {kind}")
    if tokens.shape != (vocab_size,):
        raise ValueError(
            f"vocab_order must have the token of each of vocab_size = {vocab_size} rows, "
            f"got {tuple(tokens.shape)}"
        )
    tokens = tokens.detach().to("cpu", torch.int64, copy=True)
    rows = tokens.argsort()
    if not torch.equal(tokens[rows], torch.arange(vocab_size, device="cpu")):
        raise ValueError(f"vocab_order must contain each of {vocab_size} token ids once")
    return VocabOrder(tokens, rows)


def rows_of(tokens: Tensor, row_of_token: Tensor) -> Tensor:
    """Return the rows of token ids of any shape; what is no token, such as -100, stays as it is."""
    if isinstance(tokens, DTensor):
        return in_kind(rows_of(tokens.to_local(), row_of_token), tokens)
    if tokens.dtype not in (torch.int64, torch.int32):
        return tokens  # the op refuses it
    known = (tokens >= 0) & (tokens < len(row_of_token))
    rows = row_of_token[torch.where(known, tokens, 0)]
    return torch.where(known, rows.to(tokens.dtype), tokens)


def row_of_id(token: int, order: VocabOrder) -> int:
    """``rows_of`` for one number of the host, such as ignore_index."""
    return int(order.row_of_token[token]) if 0 <= token < len(order.row_of_token) else token
