"""Token ids in an order of frequency.  V_all = vocabulary, P = ranks."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flce_dist.arguments import values
from flce_dist.arguments.check_tensors import check_tensor
from flce_dist.kernels.filtered.tiles import TILE_V

SHARDS = 64  # an order gives equal work to P ranks if P divides this


class VocabOrder(NamedTuple):
    """A permutation of the vocabulary and its inverse, each [V_all] int64 on the CPU.

    ``row_of_token[ids]`` are the ids that a model with ordered rows is trained on.
    """

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
        counts: [V_all], real: how often each token occurs, 0 or more; only their order matters.
        padded_vocab_size: rows of the whole weight if they are more than V_all; they determine
            which tiles lie on one rank. The order itself is of V_all rows: padding stays last.

    Raises:
        ValueError: counts are no tensor [V_all] of real numbers of at least 0, or the padded
        vocabulary is smaller.

    Example::

        order = filtered.frequency_order(torch.bincount(ids_of_text, minlength=1000))
        labels = order.row_of_token[ids]  # train on these, and save order.token_of_row
    """
    _check_counts(counts)
    V_all = len(counts)
    words = f"within [V_all = {V_all}, 2**63)"
    rows = values.integer("padded_vocab_size", padded_vocab_size, words, least=V_all, optional=True)
    if rows is None:
        rows = V_all
    tokens = counts.cpu().argsort(descending=True, stable=True)
    whole = V_all - V_all % TILE_V
    token_of_row = tokens.clone()
    places = torch.tensor(_dealt(whole // TILE_V, rows), dtype=torch.long, device="cpu")
    token_of_row[:whole].view(-1, TILE_V)[places] = tokens[:whole].view(-1, TILE_V)
    return VocabOrder(token_of_row, token_of_row.argsort())


def _check_counts(counts: Tensor) -> None:
    if not isinstance(counts, Tensor):
        raise ValueError(f"counts must be a tensor [V_all], got {type(counts).__name__}")
    if isinstance(counts, DTensor):
        raise ValueError(
            "counts must be a plain tensor, got a DTensor: pass counts.full_tensor() on all ranks"
        )
    check_tensor("counts", counts, (counts.dtype,))
    if counts.dim() != 1 or not counts.numel():
        raise ValueError(f"counts must be a tensor [V_all], got {tuple(counts.shape)}")
    if counts.is_complex() or not (counts >= 0).all():  # nor NaN
        least = counts.dtype if counts.is_complex() else counts.min().item()
        raise ValueError(f"counts must be real numbers of at least 0, got {least}")


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
