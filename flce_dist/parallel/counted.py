"""Gather and sum of tokens where only some of them are computed, those at ``places``.

N of T_all tokens are computed, ``places`` [N] int64 are theirs, each once. P ranks, H hidden size.
"""

from collections.abc import Callable

from torch import Tensor

from flce_dist.parallel.collectives import TokenGather, TokenSum
from flce_dist.parallel.token_order import TokenOrder


def chosen(x: Tensor, places: Tensor | None) -> Tensor:
    """Return [N, ...] of [T_all, ...]; x itself if all tokens are computed."""
    return x if places is None else x.index_select(0, places)


def put_back(x: Tensor, places: Tensor | None, T_all: int) -> Tensor:
    """Return [T_all, ...] with the rows of x [N, ...] at their places, and 0 elsewhere."""
    if places is None:
        return x
    return x.new_zeros(T_all, *x.shape[1:]).index_copy_(0, places, x)


class ChosenTokens(TokenGather):
    """The chosen ones of ``tokens`` [T_all, H], which have arrived."""

    owns_tokens = True

    def __init__(self, tokens: Tensor, places: Tensor, order: TokenOrder):
        super().__init__(chosen(tokens, places), order)


class SumPutBack(TokenSum):
    """The sum of [N, H] over ranks, in [T_all, H]."""

    def __init__(self, of_chosen: TokenSum, places: Tensor, T_all: int):
        super().__init__(of_chosen.tokens)
        self._of_chosen, self._places, self._T_all = of_chosen, places, T_all

    def start(self, first: int, last: int) -> None:
        self._of_chosen.start(first, last)

    def wait(self) -> Tensor:
        return put_back(self._of_chosen.wait(), self._places, self._T_all)


class PutBackAndScattered(TokenSum):
    """The sum over ranks of [T_all, H], where shares [N, H] lie at their places: [T_all / P, H].

    It starts with the last of the N tokens. ``new_sum`` makes that of [T_all, H].
    """

    def __init__(self, tokens: Tensor, places: Tensor, new_sum: Callable[[], TokenSum]):
        super().__init__(tokens)
        self._places, self._new_sum = places, new_sum
        self._whole: TokenSum | None = None

    def start(self, first: int, last: int) -> None:
        if last < len(self.tokens):
            return
        whole = self._whole = self._new_sum()
        whole.acquire()
        whole.tokens.zero_().index_copy_(0, self._places, self.tokens)
        whole.start(0, len(whole.tokens))

    def wait(self) -> Tensor:
        assert self._whole is not None
        return self._whole.wait()
