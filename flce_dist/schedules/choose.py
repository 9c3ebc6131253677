"""Which schedule a call takes, for which budget; ``fit`` has the sizes of each.

A pure function of facts that all ranks share, so all plan alike and issue the same collectives.
Compilers plan for a symbolic T: ``sym_min`` compares without deciding, so a graph serves all T.
T = tokens, V = rows of the largest even shard.
"""

from torch import sym_max, sym_min

from flce_dist.arguments.options import ScheduleName
from flce_dist.schedules.fit import (
    Plan,
    Shape,
    in_forward_of,
    in_forward_within,
    widest_window,
    windows_within,
)

DEFAULT_LOGITS_BYTES = 1 << 30
"""Budget of ``auto`` and ``in_forward`` where the caller names none, unless they need more."""

FROZEN_LOGITS_BYTES = 1 << 28
"""The same where hidden alone needs a gradient: chunks add to no dweight, so many cost nothing."""

FEW_COLUMNS = 1024
"""Vocabulary entries up to which fp16's ``auto`` caches nothing: a cache of exponentials is bf16,
whose rounding does not average out over so few. To compute their logits again costs little."""

_MANY_TOKENS = 16384  # tokens up to which auto, given no budget, takes all at once


def choose_schedule(
    *,
    T: int,
    V: int,
    itemsize: int,
    schedule: ScheduleName,
    max_logits_bytes: int | None,
    expressible: bool = True,
    converts: bool = False,
    dweight_row_bytes: tuple[int, int] = (0, 0),
    reduces: bool = False,
    frozen: bool = False,
) -> Plan:
    """Choose what to cache and what to recompute; docs/design.md says how ``auto`` does.

    Args:
        itemsize: bytes of one cached exponential.
        schedule: ``cached`` caches what fits, everything if no budget is given; ``recompute``
            nothing; ``in_forward`` takes all tokens at once if they fit with what dweight's own
            memory can hold, else chunks of them that fit; without a budget what ``auto`` would.
        max_logits_bytes: bound on cache plus window, per rank. 256 columns or tokens are taken even
            where they exceed it.
        expressible: whether cached exponentials express the gradient, and as accurately as the
            operands' dtype; if not, ``auto`` recomputes.
        converts: whether cached columns pass through a window of the operands' dtype (fp16).
        dweight_row_bytes: bytes of one row of dweight in in_forward, rounded at once and
            accumulating over chunks; 0 if it lends none.
        reduces: whether one scalar upstream gradient is all that backward can bring.
        frozen: whether hidden alone needs a gradient, and that of the loss alone can arrive.
    """
    shape = Shape(T, V, itemsize, converts, *dweight_row_bytes)
    if schedule == "cached":
        return windows_within(shape, max_logits_bytes, max_logits_bytes, caches=True)
    if schedule == "recompute":
        return windows_within(shape, max_logits_bytes, max_logits_bytes, caches=False)
    default = DEFAULT_LOGITS_BYTES
    if schedule == "auto" and not expressible:
        return windows_within(shape, max_logits_bytes or default, max_logits_bytes, caches=False)
    if frozen:
        return in_forward_of(shape, max_logits_bytes or FROZEN_LOGITS_BYTES)
    if schedule == "in_forward" and (max_logits_bytes is not None or not shape.row_bytes):
        return in_forward_of(shape, max_logits_bytes or default)  # no dweight to accumulate

    caches = schedule == "auto"
    reduces = reduces or schedule == "in_forward"
    if max_logits_bytes is None:  # more than the default only where that does not suffice
        within_default = _computing_once(
            shape, default, None, caches=caches, reduces=reduces, accumulates=False
        )
        if within_default is not None:
            return within_default
    budget = max_logits_bytes or sym_max(default, _bytes_to_compute_once(shape, reduces=reduces))
    within_budget = _computing_once(
        shape, budget, max_logits_bytes, caches=caches, reduces=reduces, accumulates=True
    )
    if within_budget is not None:
        return within_budget
    if caches:
        return windows_within(shape, budget, max_logits_bytes, caches=True)
    return in_forward_of(shape, default)


def _computing_once(
    shape: Shape,
    budget: int,
    limit: int | None,
    *,
    caches: bool,
    reduces: bool,
    accumulates: bool,
) -> Plan | None:
    """Return a plan within ``budget`` that computes no logits again; None if there is none.

    For example 8192 tokens of 128,256 columns in bf16: within 1 GiB a cache does not fit, and
    in_forward does, with half of dweight's memory. ``accumulates`` says whether it may also take
    chunks of tokens whose dweights add up in a wider accumulator, a pass over it for each.
    """
    if caches:
        windows = windows_within(shape, budget, limit, caches=True)
        if windows.cached_v == shape.V:
            return windows
    in_forward = in_forward_within(shape, budget) if reduces else None
    if in_forward is None:
        return None
    # In fp32 dweight is its own accumulator.
    is_wider = shape.row_bytes != shape.accumulator_row_bytes
    has_accumulator = len(in_forward.chunks()) > 1 and is_wider
    return None if has_accumulator and not accumulates else in_forward


def _bytes_to_compute_once(shape: Shape, *, reduces: bool) -> int:
    """Return the least budget with which ``auto``, given none, computes no logits again.

    It is that of up to ``_MANY_TOKENS`` at once; of more, chunks of half as many may do. Of fp32
    operands the cache holds half of the columns in it.
    """
    T = shape.T
    V = shape.V
    itemsize = shape.itemsize
    window = widest_window(shape) if shape.converts else 0
    budgets = [2 * (V + window) * sym_min(T, _MANY_TOKENS)]  # a cache of 16 bits
    if reduces and not shape.converts:
        # In_forward takes less: about half of dweight's memory holds some exponentials.
        column_bytes = T * itemsize
        budgets.append(V * (column_bytes - min(column_bytes, shape.row_bytes) // 2))
        if T >= 2 * _MANY_TOKENS:  # or chunks of tokens accumulate dweight, as in_forward_within
            of_chunk = _MANY_TOKENS // 2 * itemsize
            at_once = of_chunk + shape.accumulator_row_bytes - shape.row_bytes
            budgets.append(V * max(at_once, shape.accumulator_row_bytes))
    return min(budgets)
