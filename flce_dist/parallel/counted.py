"""Tokens at ``places``: with max_counted all that are computed, with skip_ignored those put first.

``places`` [T] int64 are those of T tokens among T_all, none twice. P ranks, H hidden size.
"""

from collections.abc import Callable

from torch import Tensor

from flce_dist.parallel.collectives import TokenGather, TokenSum


def at_places(x: Tensor, places: Tensor | None) -> Tensor:
    """Return [T, ...] of [T_all, ...]; x itself if all tokens are computed."""
    return x if places is None else x.index_select(0, places)


def put_back(x: Tensor, places: Tensor | None, T_all: int, fill: float = 0) -> Tensor:
    """Return [T_all, ...] with the rows of x [T, ...] at their places, and ``fill`` elsewhere."""
    if places is None:
        return x
    return x.new_full((T_all, *x.shape[1:]), fill).index_copy_(0, places, x)


class ChosenTokens(TokenGather):
    """The rows [T, H] at ``places`` of gathered tokens, which are waited for at once."""

    owns_tokens = True

    def __init__(self, gather: TokenGather, places: Tensor):
        super().__init__(at_places(gather.wait(), places))


class SumPutBack(TokenSum):
    """The sum of [T, H] over ranks, put back into [T_all, H]."""

    def __init__(self, of_chosen: TokenSum, places: Tensor, T_all: int):
        super().__init__(of_chosen.tokens)
        self._of_chosen = of_chosen
        self._places = places
        self._T_all = T_all

    def start(self) -> None:
        self._of_chosen.start()

    def wait(self) -> Tensor:
        return put_back(self._of_chosen.wait(), self._places, self._T_all)


class PutBackAndScattered(TokenSum):
    """Shares [T, H] put back into [T_all, H], and their sum over ranks, which ``new_sum`` makes:
    [T_all / P, H].
    """

    def __init__(self, tokens: Tensor, places: Tensor, new_sum: Callable[[], TokenSum]):
        super().__init__(tokens)
        self._places = places
        self._new_sum = new_sum

    def start(self) -> None:
        self._whole = self._new_sum()
        self._whole.acquire()
        self._whole.tokens.zero_().index_copy_(0, self._places, self.tokens)
        self._whole.start()

    def wait(self) -> Tensor:
        return self._whole.wait()
