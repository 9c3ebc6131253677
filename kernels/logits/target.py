"""What one pass over the logits is asked for.  T = tokens, N = named ids of all tokens."""

from typing import NamedTuple

from torch import Tensor


class NamedIds(NamedTuple):
    """Ids that tokens name: sums leave them out, and the pass returns their logits."""

    ids: Tensor  # [N] int64, those of one token ascending
    begin: Tensor  # [T] int64: token t has ids begin[t] to end[t]
    end: Tensor
    z: Tensor  # out: [N] in the dtype of statistics, of this shard's ids; repeated ones once


class Target(NamedTuple):
    """What is asked beside each token's maximum and sum of exponentials over the other columns.

    The others are all but the label's and, with ``named``, those of named ids, of which the label
    must be one.
    """

    with_entropy: bool = False  # sums of exp(x) * x
    with_sum_z: bool = False  # sums of x, banned columns included
    named: NamedIds | None = None
    tiles: Tensor | None = None  # out: [2, num_v, T], maxima and sums of tiles of columns

    def rows(self, tokens: Tensor | slice) -> "Target":
        """Return the same of these tokens, whose tiles nobody asks for again."""
        named = self.named
        if named is not None:
            named = named._replace(begin=named.begin[tokens], end=named.end[tokens])
        return self._replace(named=named, tiles=None)
