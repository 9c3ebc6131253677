"""The kernel interface in plain torch: any device, any float dtype, vocabulary in windows.

The same functions as in ``gpu.py``, with the same arguments. Nothing of size [T, V] is held but
the cache the caller asked for. T = tokens, V = vocabulary rows here, W = columns of one window.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flce_dist.kernels import gemm
from flce_dist.kernels.row_gradient import softcap_grad
from flce_dist.kernels.shard_logits import ShardLogits

_SCRATCH_BYTES = 8 << 20  # of one [T, W] temporary; a handful live at once
_FAR = -1e30  # a column that a bias of -inf bans has p = 0, and 0 * -inf would be NaN


def label_logit(logits: ShardLogits) -> Tensor:
    """Return [T]: the logit of each token's label, 0 where it is not owned or ignored."""
    out = torch.zeros(logits.T, dtype=logits.stats_dtype, device=logits.hidden.device)
    if logits.V == 0:
        return out
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
    return out


def linear_stats(
    logits: ShardLogits,
    label_logit: Tensor,
    *,
    cache: Tensor | None,
    with_sum_z: bool,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Return this shard's ``(others_max [T], sums [k, T])``.

    Over the columns other than the label: sums of ``exp(x)`` with ``x = z - label_logit``; with
    entropy also of ``exp(x) * x``; with sum_z also of ``x``, in that order. ``exp(x)`` may
    overflow to inf: ``rescue`` comes after. The leading ``cache.shape[1]`` columns store
    ``exp(x) * softcap'(z)`` in cache, 0 at labels and in ignored rows.
    """
    others_max = label_logit.new_full((logits.T,), -torch.inf)
    sums = label_logit.new_zeros(1 + with_entropy + with_sum_z, logits.T)
    for start, z, other in _windows(logits):
        others_max = torch.maximum(others_max, z.masked_fill(~other, -torch.inf).amax(1))
        z_above = z - label_logit[:, None]
        e = z_above.exp().masked_fill_(~other, 0.0)
        sums[0] += e.sum(1)
        if with_entropy:
            sums[1] += (e * z_above.clamp_min(_FAR)).masked_fill_(~other, 0.0).sum(1)
        if with_sum_z:
            sums[-1] += z_above.masked_fill(~other, 0.0).sum(1)
        if cache is not None:
            _store(cache, slice(None), start, e, z, other, logits.softcap)
    return others_max, sums


def rescue(
    logits: ShardLogits,
    label_logit: Tensor,
    reference: Tensor,
    sums: Tensor,
    *,
    cache: Tensor | None,
    with_entropy: bool,
) -> Tensor:
    """Return the sums [k, T] of ``linear_stats``, relative to ``reference``.

    Rows whose reference is not their label's logit are computed again, and their row of the cache
    with them; the sum of ``z - label_logit`` does not depend on the reference and stays. Reads on
    the host which rows these are, so on a GPU this implementation waits once per forward.
    """
    rows = (reference != label_logit).nonzero().squeeze(1)
    if rows.numel() == 0:
        return sums
    sums[: 1 + with_entropy, rows] = 0.0
    few = replace(logits, hidden=logits.hidden[rows], labels=logits.labels[rows])
    for start, z, other in _windows(few):
        z_above = z - reference[rows, None]
        e = z_above.exp().masked_fill_(~other, 0.0)
        sums[0, rows] += e.sum(1)
        if with_entropy:
            sums[1, rows] += (e * z_above.clamp_min(_FAR)).masked_fill_(~other, 0.0).sum(1)
        if cache is not None:
            _store(cache, rows, start, e, z, other, logits.softcap)
    return sums


def dlogits(
    logits: ShardLogits,
    reference: Tensor,
    label_value: Tensor,
    affine: tuple[Tensor, Tensor, Tensor] | None,
    *,
    out: Tensor,
) -> None:
    """Write ``out[t, v] = (exp(x) * (a + b * x) + u) * softcap'(z)`` with ``x = z - reference``;
    at the label's column ``label_value[t]``, in ignored rows 0.

    ``affine`` holds a, b, u, each [T]; None means 1, 0, 0. out is [T, V] in hidden's dtype.
    """
    for start, z, other in _windows(logits):
        x = z - reference[:, None]
        d = x.exp()
        if affine is not None:
            a, b, u = (row[:, None] for row in affine)
            d = d * (a + b * x.clamp_min(_FAR)) + u
        d = d * softcap_grad(z, logits.softcap)
        d = d.where(other, label_value[:, None]).masked_fill_(~logits.counted[:, None], 0.0)
        out[:, start : start + z.shape[1]] = d


def scale_rows(
    x: Tensor,
    scale: Tensor,
    counted: Tensor,
    *,
    plus: tuple[Tensor, Tensor] | None = None,
    out: Tensor,
) -> None:
    """Write ``out[t] = scale[t] * x[t] (+ u[t] * row)``, 0 where not counted.

    x and out are [T, N], scale and counted [T]; ``plus`` holds u [T] and row [N]. Rows that are not
    counted are selected away, not multiplied by 0: they may hold NaN.
    """
    for t in gemm.slices(x.shape[0], 4 * x.shape[1]):
        rows = x[t].to(scale.dtype) * scale[t, None]
        if plus is not None:
            u, row = plus
            rows += u[t, None] * row
        out[t] = rows.where(counted[t, None], 0.0)


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
    cache: Tensor,
    rows: Tensor | slice,
    start: int,
    e: Tensor,
    z: Tensor,
    other: Tensor,
    softcap: float | None,
) -> None:
    """Store the derivative of ``e`` by the uncapped logit in the columns that the cache has."""
    width = min(z.shape[1], cache.shape[1] - start)
    if width > 0:
        de = (e * softcap_grad(z, softcap)).masked_fill_(~other, 0.0)
        cache[rows, start : start + width] = de[:, :width].to(cache.dtype)
