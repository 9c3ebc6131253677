"""How the logits are walked: what is cached, what is recomputed, in which pieces.

``plan`` is a pure function of facts that all ranks of a tensor-parallel group share, so that all
ranks walk alike and issue the same collectives. T = tokens, V = rows of the largest shard.
"""

from dataclasses import dataclass
from typing import Literal

from flce_dist.options import Schedule

DEFAULT_LOGITS_BYTES = 1 << 30
"""Budget of ``auto`` and ``in_forward`` where the caller names none."""

_WINDOW_BYTES = 264 << 20  # 16,896 columns of 8192 tokens in bf16
_MIN_WINDOW, _MAX_WINDOW = 4096, 33792
_WAVE = 8448  # columns, 64 * 132: products over a multiple fill the last wave of an H200, too
_TILE = 256  # columns, tokens: pieces are multiples of this, the kernels' largest tile


_MOST_RECOMPUTED = 1 / 10  # of the columns: beyond, accumulating chunks in fp32 is faster


@dataclass(frozen=True)
class Lending:
    """How the leading columns' exponentials lie in the memory of dweight, which is written last.

    Window i, columns ``[i, i + 1) * window_v``, lies at rows ``window_v + i * window_rows`` and on.
    Its gradient goes to rows ``[i, i + 1) * window_v``, and since ``window_rows >= window_v`` these
    lie below window i and all later ones: nothing is overwritten before it was used.
    """

    window_v: int
    window_rows: int
    windows: int

    def rows(self, V: int) -> list[int]:
        """First row of each window in a dweight of V rows."""
        firsts = (self.window_v + i * self.window_rows for i in range(self.windows))
        return [row for row in firsts if row + self.window_rows <= V]


@dataclass(frozen=True)
class Plan:
    """The schedule and its sizes.

    ``cached_v`` leading columns of the shard keep their exponentials from forward to backward; the
    others are recomputed in backward, ``window_v`` columns at a time. ``chunk_t`` tokens are
    walked at a time (all of them but for in_forward). ``logits_bytes`` is the most that cache and
    window take together, beside what ``lending`` places in dweight.
    """

    schedule: Literal["recompute", "cached", "in_forward"]
    T: int
    V: int
    cached_v: int
    window_v: int
    chunk_t: int
    logits_bytes: int
    lending: Lending | None = None

    def cached_columns(self, V: int) -> int:
        """Columns cached by a rank that holds ``V`` rows; a plan that caches all caches all."""
        return V if self.cached_v >= self.V else min(self.cached_v, V)

    def chunks(self) -> list[tuple[int, int]]:
        """Token chunks ``(start, end)``, the same on every rank."""
        return [(t, min(t + self.chunk_t, self.T)) for t in range(0, max(1, self.T), self.chunk_t)]


def plan(
    *,
    T: int,
    V: int,
    itemsize: int,
    schedule: Schedule,
    max_logits_bytes: int | None,
    expressible: bool = True,
    converts: bool = False,
    dweight_row_bytes: int = 0,
) -> Plan:
    """Choose what to cache and what to recompute within ``max_logits_bytes``.

    Args:
        T: tokens on the tensor-parallel group.
        V: rows of the largest shard, ``ceil(V_all / P)``.
        itemsize: bytes of one cached exponential.
        schedule: ``auto`` caches what fits into the budget (1 GiB unless given) and recomputes the
            rest; ``cached`` does the same but caches everything unless a budget is given;
            ``recompute`` caches nothing; ``in_forward`` takes all tokens at once if they fit with
            what dweight's own memory can hold, else token chunks that fit.
        max_logits_bytes: bound on cache plus window, per rank. The smallest piece, 256 columns or
            tokens, is used even where it exceeds the bound.
        expressible: whether cached exponentials express the gradient; if not, ``auto`` recomputes.
        converts: whether cached columns pass through a window of the operands' dtype (fp16).
        dweight_row_bytes: bytes of one row of dweight as in_forward makes it; 0 if it does not.
    """
    column_bytes = max(1, T * itemsize)
    if schedule == "in_forward":
        chunk_bytes = DEFAULT_LOGITS_BYTES if max_logits_bytes is None else max_logits_bytes
        whole = _lend(T, V, itemsize, chunk_bytes // column_bytes, dweight_row_bytes)
        if whole is not None and not converts:
            return whole
        chunk = max(_TILE, _round_down(chunk_bytes // max(1, V * itemsize)))
        chunk = min(T, _round_up(-(-T // max(1, -(-T // chunk)))))
        window = max(1, min(_MIN_WINDOW, V))
        held = V + (window if converts else 0)
        return Plan(schedule, T, V, V, window, max(1, chunk), chunk * held * itemsize)

    caching = schedule == "cached" or (schedule == "auto" and expressible)
    window = min(_MAX_WINDOW, max(_MIN_WINDOW, _round_down(_WINDOW_BYTES // column_bytes)))
    budget = max_logits_bytes
    if budget is None and schedule == "auto":
        budget = DEFAULT_LOGITS_BYTES
    if budget is not None:
        most = 0.3 * budget if caching else budget  # what is cached gets the larger part
        window = min(window, max(_TILE, _round_down(int(most) // column_bytes)))
    if window > _WAVE:
        window -= window % _WAVE
    window = max(1, min(window, V))

    if not caching:
        cached = 0
    elif budget is None or (V + (window if converts else 0)) * column_bytes <= budget:
        cached = V
    else:
        cached = max(0, _round_down((budget - window * column_bytes) // column_bytes))
    held = cached + (window if cached < V or converts else 0)
    name: Literal["recompute", "cached"] = "cached" if cached else "recompute"
    return Plan(name, T, V, cached, window, max(1, T), held * column_bytes if T else 0)


def _lend(T: int, V: int, itemsize: int, columns: int, row_bytes: int) -> Plan | None:
    """Plan one chunk of more than ``columns``, by dweight's memory and a little recomputing.

    None if it fits without, or does not fit even so.
    """
    if columns >= V or not row_bytes or V < 2 * _WAVE:
        return None
    window_bytes = T * _WAVE * itemsize
    rows = max(_WAVE, -(-window_bytes // (16 * row_bytes)) * 16)
    windows = min((V - _WAVE) // rows, -(-(V - columns) // _WAVE))
    lent = windows * _WAVE
    window = min(_MIN_WINDOW, V)
    cached = V
    if V - lent > columns:
        window = min(window, _round_down(columns // 8))
        cached = _round_down(lent + columns - window)
    if windows < 1 or window < _TILE or V - cached > V * _MOST_RECOMPUTED:
        return None
    held = cached - lent + (window if cached < V else 0)
    lending = Lending(_WAVE, rows, windows)
    return Plan("in_forward", T, V, cached, window, T, held * T * itemsize, lending)


def _round_down(n: int) -> int:
    return n // _TILE * _TILE


def _round_up(n: int) -> int:
    return -(-n // _TILE) * _TILE
