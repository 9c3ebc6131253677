"""D of a chunk's windows: cached by forward, converted, or computed again.  T = tokens."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from flce_dist.core.call import Call
from flce_dist.kernels import gemm
from flce_dist.kernels.logits.operands import ColumnCache, ShardLogits, Window, new_window, part_of
from flce_dist.kernels.rows.formulas import RowGradient
from flce_dist.parallel.collectives import TokenGather


class Elements(Protocol):
    """What is written into D beside what follows from tokens' factors."""

    def write(self, d: Tensor, start: int) -> None:
        """Write or add to d [T, W], the columns from ``start`` of this shard on."""


class Chunk(NamedTuple):
    """Tokens ``first <= t < last`` whose statistics are known. Tensors hold these tokens only."""

    tokens: tuple[int, int]
    labels: Tensor
    rows: RowGradient
    cache: ColumnCache
    cached_reference: Tensor | None  # [T] of cached exponentials; None if D is cached as it is
    gather: TokenGather | None  # None where nothing needs hidden
    logits: ShardLogits | None  # hidden may still be arriving
    window_v: int  # columns of D that are computed, or converted, at a time
    elements: Elements | None = None
    n_counted: Tensor | None = None  # as in ``ShardLogits``
    again: Tensor | None = None  # [] int32: how many tokens' cached columns are computed again

    @property
    def contains_upstream(self) -> bool:
        """Whether D, unlike cached exponentials, contains the upstream gradients."""
        return bool(self.rows.affine)

    def rescales(self, call: Call) -> bool:
        """Whether cached columns are written once more before the GEMMs."""
        if self.cached_reference is None:
            return False
        return call.rescales_cache or self.contains_upstream


def split_columns(call: Call, chunk: Chunk) -> list[Window]:
    """Cut the shard's columns into windows, cached ones first; an empty shard has an empty one."""
    # A cache in the operands' dtype is used as it is; another is converted a window at a time.
    as_it_is = call.cache_dtype == call.dtype and not chunk.contains_upstream
    cached_step = max(1, call.V) if as_it_is else chunk.window_v
    return chunk.cache.split(call.V, chunk.window_v, cached_step) or [Window(0, 0, None)]


def product_of(call: Call, chunk: Chunk) -> Callable[..., None]:
    """Return ``gemm.product``, over the tokens of the chunk that count where others are skipped."""
    if chunk.n_counted is None:
        return gemm.product
    return functools.partial(call.kernels.counted_gemm, count=chunk.n_counted)


def dlogits(
    call: Call, chunk: Chunk, rows: RowGradient, windows: Sequence[Window]
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield ``start, end`` and D [T, end - start] of each window, which the next may overwrite."""
    buffer = None
    for window in windows:
        start, end, cached = window
        if cached is not None and not chunk.rescales(call):
            yield start, end, cached
            continue
        if buffer is None:
            widest = max(last - first for first, last, _ in windows)
            buffer = new_window(len(chunk.labels), widest, call.dtype, chunk.labels.device)
        d = part_of(buffer, 0, end - start)
        if cached is not None:
            _rescale(call, chunk, rows, window, out=d)
            # The host does not wait for a GPU's number: of 0 tokens the kernel computes none.
            if chunk.again is not None and (chunk.again.is_cuda or chunk.again > 0):
                _recompute(call, chunk, rows, window, chunk.again, out=d)
        elif start < end:
            _recompute(call, chunk, rows, window, chunk.n_counted, out=d)
        if chunk.elements is not None:
            chunk.elements.write(d, start)
        yield start, end, d


def _recompute(
    call: Call,
    chunk: Chunk,
    rows: RowGradient,
    window: Window,
    n_counted: Tensor | None,
    out: Tensor,
) -> None:
    assert chunk.logits is not None and chunk.gather is not None
    chunk.gather.wait()
    logits = chunk.logits.columns(window.start, window.end)._replace(n_counted=n_counted)
    call.kernels.dlogits(logits, rows.reference, rows.label_value, rows.affine, out=out)


def _rescale(call: Call, chunk: Chunk, rows: RowGradient, window: Window, out: Tensor) -> None:
    """Multiply exponentials by the tokens' scales; in fp16 make them relative to lse."""
    assert window.cached is not None and chunk.cached_reference is not None
    if rows.affine:
        change = rows.affine[0]
    else:
        change = (chunk.cached_reference - rows.reference).exp()
    labels = chunk.labels
    ignore_index = call.options.ignore_index
    call.kernels.scale_rows(window.cached, change, labels, ignore_index=ignore_index, out=out)
    first = call.vocab_start_index + window.start
    call.kernels.write_at_ids(out, labels, None, rows.label_value, first, ignore_index)
