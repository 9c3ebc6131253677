"""Who holds which rows of the vocabulary.  V = rows here, V_all = true vocabulary, P = TP size."""

from dataclasses import dataclass


def vocab_range(vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the half-open rows ``(vocab_start_index, vocab_end_index)`` of ``rank``.

    The vocabulary is cut into ``world_size`` runs of ``ceil(vocab_size / world_size)`` rows; where
    that does not divide, the last runs are short or empty (507 over 4: 127, 127, 127, 126).
    """
    rows = -(-vocab_size // world_size)
    return min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size)


INVARIANT_ROWS = 32
"""Under tp_invariant, shards begin at multiples of it. 128,256 rows over 8 ranks do."""


@dataclass(frozen=True)
class VocabShard:
    """The rows of one rank: ``weight[i]`` is the output embedding of token ``start + i``.

    ``vocab_size`` is the true global size. Rows at or beyond it are padding: the first ``V`` rows
    of the shard are real, the rest take no part in anything and get a zero gradient.
    """

    start: int
    end: int
    vocab_size: int

    @property
    def V(self) -> int:
        """Number of real (unpadded) rows of this shard; 0 where it holds padding only."""
        return max(0, min(self.end, self.vocab_size) - self.start)
