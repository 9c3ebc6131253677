"""The kernel interface in plain torch: any device, any float dtype, vocabulary in windows.

The same functions as in ``gpu.py``, with the same arguments. Nothing of size [T, V] is held but
the cache the caller asked for. T = tokens, V = vocabulary rows here, W = columns of one window.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flce_dist.kernels import gemm
from flce_dist.kernels.column_cache import ColumnCache
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_gradient_formulas import label_value, row_gradient, softcap_grad
from flce_dist.kernels.token_loss_formulas import (
    FAR,
    LossTerms,
    TokenStats,
    first_reference,
    is_rescued,
    loss_of,
    pick_reference,
)

__all__ = [
    "clear_ignored",
    "dlogits",
    "label_logit",
    "linear_stats",
    "loss_norm",
    "new_sums",
    "reduce_loss",
    "rescue",
    "row_gradient",
    "scale",
    "scale_rows",
    "sum_shares",
    "token_loss",
    "write_label_value",
]

_SCRATCH_BYTES = 8 << 20  # of one [T, W] temporary; a handful live at once


def label_logit(logits: ShardLogits, *, vocab_size: int, out: Tensor) -> None:
    """Write to [T] the logit of each token's label, 0 where it is not owned or ignored.

    On a GPU a label that is neither in the vocabulary of ``vocab_size`` nor ignored is a
    device-side assertion: the error arrives with the next synchronisation.
    """
    if logits.labels.is_cuda:
        known = (logits.labels >= 0) & (logits.labels < vocab_size)
        torch._assert_async(
            (known | ~logits.counted).all(), "labels must be within [0, vocab_size) or ignore_index"
        )
    if logits.V == 0:
        out.zero_()
        return
    step = max(1, _SCRATCH_BYTES // (4 * logits.H))
    for start in range(0, logits.T, step):
        chunk = logits.tokens(start, start + step)
        column = chunk.labels - chunk.vocab_start_index
        owned = (column >= 0) & (column < chunk.V) & chunk.counted
        column = column.where(owned, 0)
        z = chunk.hidden.to(out.dtype) * chunk.weight[column].to(out.dtype)
        z = z.sum(1) * chunk.logit_scale
        if chunk.bias is not None:
            z = z + chunk.bias[column].to(out.dtype)
        out[start : start + step] = _softcap(z, chunk.softcap).where(owned, 0.0)


def new_sums(logits: ShardLogits, *, with_sum_z: bool, with_entropy: bool) -> Tensor:
    """Return memory [k, T] for the sums of ``linear_stats``."""
    k = 1 + with_entropy + with_sum_z
    return logits.hidden.new_empty(k, logits.T, dtype=logits.stats_dtype)


def linear_stats(
    logits: ShardLogits,
    label_logit: Tensor,
    *,
    cache: ColumnCache,
    with_sum_z: bool,
    with_entropy: bool,
    others_max: Tensor,
    sums: Tensor,
) -> None:
    """Write this shard's ``others_max`` [T] and ``sums`` [k, T].

    Over the columns other than the label: sums of ``exp(x)`` with ``x = z - first_reference``; with
    entropy also of ``exp(x) * x``; with sum_z also of ``x``, in that order. ``exp(x)`` may
    overflow to inf: ``rescue`` comes after. The columns that cache has store
    ``exp(x) * softcap'(z)`` there, 0 at labels and in ignored rows.
    """
    others_max.fill_(-torch.inf)
    sums.zero_()
    reference = first_reference(label_logit)[:, None]
    for start, z, other in _windows(logits):
        window_max = z.masked_fill(~other, -torch.inf).amax(1)
        torch.maximum(others_max, window_max, out=others_max)
        z_above = z - reference
        e = z_above.exp().masked_fill_(~other, 0.0)
        sums[0] += e.sum(1)
        if with_entropy:
            sums[1] += (e * z_above.clamp_min(FAR)).masked_fill_(~other, 0.0).sum(1)
        if with_sum_z:
            sums[-1] += z_above.masked_fill(~other, 0.0).sum(1)
        _store(cache, slice(None), start, e, z, other, logits.softcap)


def rescue(
    logits: ShardLogits,
    label_logit: Tensor,
    others_max: Tensor,
    sums: Tensor,
    *,
    cache: ColumnCache,
    with_entropy: bool,
) -> Tensor:
    """Return what is to be summed over ranks: ``sums`` itself, written in place.

    ``others_max`` is the maximum over all ranks. The sums of ``linear_stats`` that overflow, see
    ``is_rescued``, are replaced: these rows of sums and of the cache are relative to
    ``pick_reference``. The sum of ``z - first_reference`` stays. Reads on the host which rows these
    are, so on a GPU this implementation waits once per forward.
    """
    reference = pick_reference(label_logit, others_max)
    rows = is_rescued(label_logit, others_max).nonzero().squeeze(1)
    if rows.numel() == 0:
        return sums
    sums[: 1 + with_entropy, rows] = 0.0
    few = replace(logits, hidden=logits.hidden[rows], labels=logits.labels[rows])
    for start, z, other in _windows(few):
        z_above = z - reference[rows, None]
        e = z_above.exp().masked_fill_(~other, 0.0)
        sums[0, rows] += e.sum(1)
        if with_entropy:
            sums[1, rows] += (e * z_above.clamp_min(FAR)).masked_fill_(~other, 0.0).sum(1)
        _store(cache, rows, start, e, z, other, logits.softcap)
    return sums


def token_loss(
    labels: Tensor,
    token_weight: Tensor | None,
    label_logit: Tensor,
    others_max: Tensor,
    sums: Tensor,
    terms: LossTerms,
    *,
    with_entropy: bool,
) -> tuple[TokenStats, Tensor, Tensor]:
    """Return ``(stats, loss, label_value)``, each [T].

    label_logit, others_max and sums (of ``rescue``) are those of the whole vocabulary. loss is
    weighted, and 0 where ignored; label_value is D at the label's column, relative to the reference
    of stats (see ``row_gradient``).
    """
    reference = pick_reference(label_logit, others_max)
    sum_z = sums[-1] if terms.label_smoothing else None
    sum_ez = sums[1] if with_entropy else None
    stats = TokenStats(label_logit, reference, sums[0], others_max, sum_z, sum_ez)
    loss = loss_of(stats, terms)
    if token_weight is not None:
        loss = loss * token_weight
    loss = loss.where(labels != terms.ignore_index, 0.0)
    return stats, loss, label_value(stats, reference, terms)


def loss_norm(
    labels: Tensor, token_weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Return what a mean divides by: the sum of counted tokens' weights, 1 where all are 0."""
    weights = (labels != ignore_index).to(dtype)
    if token_weight is not None:
        weights = token_weight.where(labels != ignore_index, 0.0)
    return weights.sum().where((weights != 0).any(), 1.0)


def reduce_loss(loss: Tensor, norm: Tensor | None) -> Tensor:
    """Return ``loss.sum() / norm``, a scalar; None is 1."""
    return loss.sum() if norm is None else loss.sum() / norm


def dlogits(
    logits: ShardLogits,
    reference: Tensor,
    label_value: Tensor,
    affine: tuple[Tensor, ...],
    *,
    out: Tensor,
) -> None:
    """Write ``out[t, v] = (exp(x) * (a + b * x) + u) * softcap'(z)`` with ``x = z - reference``;
    at the label's column ``label_value[t]``, in ignored rows 0.

    ``affine`` holds a, b, u, each [T] and finite in ignored rows: all three, a alone beside
    b = u = 0, or none beside a = 1. out is [T, V] in hidden's dtype.
    """
    rows = [row[:, None] for row in affine]
    for start, z, other in _windows(logits):
        x = z - reference[:, None]
        d = x.exp()
        if len(rows) == 3:
            a, b, u = rows
            d = d * (a + b * x.clamp_min(FAR)) + u
        elif rows:
            d *= rows[0]
        d = d * softcap_grad(z, logits.softcap)
        d = d.where(other, label_value[:, None]).masked_fill_(~logits.counted[:, None], 0.0)
        out[:, start : start + z.shape[1]] = d


def write_label_value(
    out: Tensor, labels: Tensor, value: Tensor, *, vocab_start_index: int, ignore_index: int
) -> None:
    """Write ``out[t, labels[t] - vocab_start_index] = value[t]`` where that column exists.

    out is [T, V], value [T]; rows of ignored tokens stay. A gather
    and a scatter of one column per row: no index lists, so that the host need not wait.
    """
    if out.shape[1] == 0:
        return
    column = labels - vocab_start_index
    owned = (column >= 0) & (column < out.shape[1]) & (labels != ignore_index)
    column = column.where(owned, 0)[:, None]
    value = value.to(out.dtype)[:, None]
    if out.element_size() == 2:
        # As bits: torch's CPU scatter of half floats makes an fp32 copy of its whole destination.
        out, value = out.view(torch.int16), value.view(torch.int16)
    out.scatter_(1, column, value.where(owned[:, None], out.gather(1, column)))


def scale(x: Tensor, factor: Tensor, *, out: Tensor) -> None:
    """Write ``out = x * factor``; factor is a scalar."""
    torch.mul(x, factor, out=out)


def clear_ignored(x: Tensor, labels: Tensor, *, ignore_index: int) -> None:
    """Write 0 into the rows of x [T, N] whose token is ignored; the others stay."""
    x.masked_fill_((labels == ignore_index)[:, None], 0.0)


def sum_shares(
    own: Tensor, others: Tensor, rank: int, scale: Tensor | None, *, out: Tensor
) -> None:
    """Write ``scale[t]`` times the sum of all ranks' shares [T, H]; others are [P - 1, T, H].

    The sum is taken in the order of ranks; scale is [T], None is 1.
    """
    shares = torch.cat([others[:rank], own[None], others[rank:]])
    total = shares.sum(0, dtype=gemm.acc_dtype(own.dtype))
    out.copy_(total if scale is None else total * scale[:, None])


def scale_rows(
    x: Tensor,
    scale: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int,
    plus: tuple[Tensor, Tensor] | None = None,
    out: Tensor,
) -> None:
    """Write ``out[t] = scale[t] * x[t] (+ u[t] * row)``, 0 where the token is ignored.

    x and out are [T, N], also the same; scale [T], None is 1; ``plus`` holds u [T] and row [N].
    Rows of ignored tokens are selected away, not multiplied by 0: they may hold NaN.
    """
    for t in gemm.slices(x.shape[0], 4 * x.shape[1]):
        rows = x[t]
        if scale is not None:
            rows = rows.to(scale.dtype) * scale[t, None]
        if plus is not None:
            u, row = plus
            rows = torch.addcmul(rows, u[t, None], row)
        out[t] = rows.where((labels[t] != ignore_index)[:, None], 0.0)


def _windows(logits: ShardLogits) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield ``(start, z [T, W], other [T, W])``; other is False at labels and in ignored rows."""
    hidden = gemm.operand(logits.hidden)
    counted = logits.counted[:, None]
    step = max(1, _SCRATCH_BYTES // (4 * max(1, logits.T)))
    for start in range(0, logits.V, step):
        window = logits.columns(start, start + step)
        z = gemm.project(hidden, window.weight) * logits.logit_scale
        if window.bias is not None:
            z = z + window.bias.to(z.dtype)
        z = _softcap(z, logits.softcap)
        column = torch.arange(window.V, device=z.device) + window.vocab_start_index
        yield start, z, (column != logits.labels[:, None]) & counted


def _softcap(z: Tensor, softcap: float | None) -> Tensor:
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _store(
    cache: ColumnCache,
    rows: Tensor | slice,
    start: int,
    e: Tensor,
    z: Tensor,
    other: Tensor,
    softcap: float | None,
) -> None:
    """Store the derivative of ``e`` by the uncapped logit in the columns that the cache has."""
    end = start + z.shape[1]
    for first, window in cache.pieces():
        a, b = max(start, first), min(end, first + window.shape[1])
        if a < b:
            part = slice(a - start, b - start)
            de = e[:, part] * softcap_grad(z[:, part], softcap)
            de = de.masked_fill_(~other[:, part], 0.0)
            window[rows, a - first : b - first] = de.to(window.dtype)
