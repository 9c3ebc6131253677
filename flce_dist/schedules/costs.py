"""What a planned call takes: GEMMs, and memory beyond its operands and gradients.

T = tokens that are computed, V = rows of the largest even shard, H = hidden size, P = ranks.
"""

from typing import NamedTuple

from flce_dist.core.call import Needs
from flce_dist.schedules.fit import Plan
from flce_dist.schedules.in_forward import InForward

_TOKEN_BYTES = 64  # of a token's statistics, factors and loss, at most


class Shapes(NamedTuple):
    """Sizes of a call that a schedule need not know."""

    H: int
    trained: int  # columns of weight that are trained, if weight needs a gradient
    itemsize: int  # of hidden, weight and their gradients
    T_all: int  # tokens of the caller, on all ranks
    P: int
    sequence_parallel: bool
    reduces_dhidden: bool  # over ranks
    chooses_tokens: bool  # so that hidden is copied: max_counted or skip_ignored
    accumulates_dweight: bool  # into memory that exists before
    sums_in_fp32: bool  # dhidden over ranks: reduce_in_fp32


def gemms(sizes: Plan, needs: Needs, shapes: Shapes) -> tuple[float, float]:
    """Return how many GEMMs of 2 T H V flop forward and backward make.

    Backward makes one more where a gradient of the entropy arrives.
    """
    if not any(needs):
        return 1.0, 0.0
    gradients = needs.hidden + needs.weight * shapes.trained / shapes.H
    computed_again = 1.0 - sizes.cached_v / max(1, sizes.V)
    if not isinstance(sizes, InForward):
        return 1.0, gradients + computed_again
    of_first_chunk = sizes.first_t / max(1, sizes.T)
    return 1.0 + gradients + computed_again * of_first_chunk, 0.0


def chunk_sizes(sizes: Plan, shapes: Shapes) -> list[int]:
    """Return the tokens that are taken one after the other, of all ranks where these are sections.

    A section has the same rows of each rank, so at most P - 1 tokens less than its chunk.
    """
    if not isinstance(sizes, InForward):
        return [sizes.T]
    if _is_cut(sizes, shapes):
        P = shapes.P
        return [P * (last - first) for first, last in sizes.rows_of_chunks(P)]
    return [last - first for first, last in sizes.chunks()]


def total_bytes(sizes: Plan, needs: Needs, shapes: Shapes) -> int:
    """Return the most that exists at a time beyond operands and gradients.

    Beside that partial statistics of up to 17 MiB, with tp_invariant 40, and on a CPU temporaries.
    """
    T = sizes.T
    H = shapes.H
    itemsize = shapes.itemsize
    of_tokens = T * _TOKEN_BYTES + _travelling_bytes(sizes, needs, shapes)
    if shapes.chooses_tokens:
        of_tokens += T * H * itemsize
    if not any(needs):
        return of_tokens
    of_gemms = sizes.logits_bytes
    if needs.hidden:
        of_gemms += _dhidden_bytes(sizes, shapes)
    elif needs.weight:  # hidden times the tokens' factors
        of_gemms += itemsize * max(chunk_sizes(sizes, shapes)) * shapes.trained
    if needs.weight and isinstance(sizes, InForward):
        of_gemms = _with_dweight(of_gemms, sizes, shapes)
    return of_tokens + of_gemms


def _dhidden_bytes(sizes: Plan, shapes: Shapes) -> int:
    """Return what dhidden takes beyond the gradient: its accumulator, in fp32.

    In fp16 ``in_forward`` keeps all of it in fp32, since a loss scale comes later. On one rank that
    is the accumulator, too; where ranks sum it, their share and its sum.
    """
    wide = max(4, shapes.itemsize)
    if not isinstance(sizes, InForward):
        return wide * sizes.T * shapes.H
    accumulator = wide * max(chunk_sizes(sizes, shapes)) * shapes.H
    if not sizes.converts:
        return accumulator
    kept = (4 - shapes.itemsize) * sizes.T * shapes.H
    if _is_cut(sizes, shapes):
        return accumulator + kept // shapes.P
    sums_over_ranks = shapes.P > 1 and shapes.reduces_dhidden
    return accumulator if sums_over_ranks else kept


def _is_cut(sizes: InForward, shapes: Shapes) -> bool:
    """Whether chunks are sections, whose hidden states and dhidden travel one after the other."""
    is_split = shapes.sequence_parallel and shapes.P > 1 and not shapes.chooses_tokens
    return is_split and len(sizes.rows_of_chunks(shapes.P)) > 1


def _share_itemsize(sizes: Plan, shapes: Shapes) -> int:
    """Return the bytes of an element of dhidden as ranks sum it."""
    keeps_fp32 = isinstance(sizes, InForward) and sizes.converts
    return max(4, shapes.itemsize) if keeps_fp32 or shapes.sums_in_fp32 else shapes.itemsize


def _section_bytes(sizes: InForward, needs: Needs, shapes: Shapes) -> int:
    """Return what travels of sections at a time, beside dhidden's accumulator.

    Hidden of the next one, and of this one while the weight's gradient reads it; where ranks copy
    it from; a share of dhidden, and its sum if that is to be rounded. All ranks' shares are gone
    before there is an accumulator.
    """
    elements = max(chunk_sizes(sizes, shapes)) * shapes.H
    hidden = elements * shapes.itemsize
    dhidden = 0
    if needs.hidden:
        share = _share_itemsize(sizes, shapes)
        is_rounded = share > shapes.itemsize and not sizes.converts
        rounded = elements // shapes.P * share if is_rounded else 0
        dhidden = elements * share + rounded
    return (2 if needs.weight else 1) * hidden + hidden // shapes.P + dhidden


def _travelling_bytes(sizes: Plan, needs: Needs, shapes: Shapes) -> int:
    """Return what hidden and dhidden take that travel between ranks."""
    P = shapes.P
    elements = shapes.T_all * shapes.H  # of all ranks
    hidden = elements * shapes.itemsize
    share = _share_itemsize(sizes, shapes)
    if P == 1:
        return 0
    if not shapes.sequence_parallel:
        sums = needs.hidden and shapes.reduces_dhidden
        return sizes.T * shapes.H * share if sums else 0
    if isinstance(sizes, InForward) and _is_cut(sizes, shapes):
        return _section_bytes(sizes, needs, shapes)
    if not needs.hidden:
        return hidden + hidden // P
    sum_beyond_gradient = elements // P * (share - shapes.itemsize)
    once = hidden + elements * share + sum_beyond_gradient
    if isinstance(sizes, InForward):
        return once
    is_mixed = 0 < sizes.cached_v < sizes.V
    recomputes_fp16 = sizes.converts and not sizes.cached_v
    return once + hidden if is_mixed or recomputes_fp16 else once


def _with_dweight(of_gemms: int, sizes: InForward, shapes: Shapes) -> int:
    """Add what a dweight that forward makes takes beyond the gradient that backward returns."""
    elements = sizes.V * shapes.trained
    itemsize = shapes.itemsize
    is_wide = sizes.converts or len(sizes.chunks()) > 1  # accumulates chunks, or passes fp16's end
    dweight = elements * (max(4, itemsize) if is_wide else itemsize)
    gradient = elements * itemsize
    if shapes.accumulates_dweight:  # there is no such gradient
        return of_gemms + dweight
    rounded = dweight if dweight > gradient else 0  # beside the gradient, when GEMMs are done
    return max(of_gemms + dweight - gradient, rounded)
