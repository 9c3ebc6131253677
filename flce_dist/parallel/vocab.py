"""Who holds which rows of the vocabulary.  V = rows here, V_all = true vocabulary, P = TP size."""

from flce_dist.arguments import values


def vocab_range(vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the half-open rows ``(vocab_start_index, vocab_end_index)`` of ``rank``.

    Every rank gets ``ceil(vocab_size / world_size)`` rows as long as there are any left; the last
    ranks may get fewer or none (507 over 4: 127, 127, 127, 126).

    Raises:
        ValueError: an argument is no int, rank is not within [0, world_size), or vocab_size is
        negative.

    Example::

        start, end = vocab_range(507, rank=3, world_size=4)  # (381, 507)
    """
    vocab_size = values.integer("vocab_size", vocab_size, "within [0, 2**63)", least=0)
    world_size = values.count("world_size", world_size)
    rank = values.integer("rank", rank, "within [0, world_size)", least=0)
    if rank >= world_size:
        raise ValueError(f"rank must be within [0, world_size = {world_size}), got {rank}")
    rows = -(-vocab_size // world_size)
    return min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size)


def largest_shard(V: int, *, vocab_size: int | None, is_uneven: bool, P: int) -> int:
    """Return how many real rows the largest of P shards has, of which this rank's has V.

    ``is_uneven`` says that shards are named by ranges: then ``vocab_size`` tells an even share.
    """
    if is_uneven:
        return -(-(vocab_size or 0) // P)
    return V if vocab_size is None else min(V, vocab_size)


INVARIANT_ROWS = 32
"""Under tp_invariant every shard begins at a multiple of this, as 128,256 rows over 8 ranks do."""


def real_rows(rows: tuple[int, int], vocab_size: int) -> int:
    """Return V, how many of a shard's rows ``(start, end)`` are below ``vocab_size``.

    The others are padding: they do not enter the loss and get a zero gradient.
    """
    start, end = rows
    return max(0, min(end, vocab_size) - start)
