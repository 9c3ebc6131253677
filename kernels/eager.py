"""The functions of ``gpu.py``, whose docstrings hold here, in plain PyTorch, also in fp64.

Statistics are fp32, or fp64 for fp64 operands, and sums are plain sums. Logits exist for a window
of columns at a time. T = tokens, V = vocabulary rows here, W = columns of one window.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flce_dist.kernels import gemm
from flce_dist.kernels.filtered.eager import write_tile_stats
from flce_dist.kernels.gemm import product as counted_gemm  # noqa: F401
from flce_dist.kernels.ids.eager import (  # noqa: F401
    dhidden_of_ids,
    dweight_of_ids,
    set_gradient,
    set_scores,
    write_first,
)
from flce_dist.kernels.ids.token_ids import sorted_ids  # noqa: F401
from flce_dist.kernels.logits.eager import (  # noqa: F401
    assert_in_vocabulary,
    dlogits,
    logits_at,
    named_in,
    slope_of,
    windows,
    write_at_labels,
    write_label_value,
)
from flce_dist.kernels.logits.operands import ColumnCache, ShardLogits
from flce_dist.kernels.logits.target import Target
from flce_dist.kernels.rows.formulas import (  # noqa: F401
    FAR,
    LabelWindow,
    LossTerms,
    TokenStats,
    first_reference,
    is_rescued,
    label_value,
    loss_of,
    pick_reference,
    row_gradient,
)
from flce_dist.torch_private.devices import assert_soon


def logits_at_ids(
    logits: ShardLogits, ids: Tensor, token: Tensor | None, *, vocab_size: int
) -> Tensor:
    is_id = ids != logits.ignore_index
    if ids.is_cuda and token is None:
        assert_in_vocabulary(ids, is_id, vocab_size)
    inverse = logits.inverse_temperature
    if ids.is_cuda and inverse is not None:
        bad = (inverse if token is None else inverse[token]).isnan() & is_id
        assert_soon(~bad.any(), "temperature must be finite and above 0")
    row = ids - logits.vocab_start_index
    z = ids.new_zeros(len(ids), dtype=logits.stats_dtype)
    here = (row >= 0) & (row < logits.V) & is_id
    for n in gemm.slices(len(ids) if logits.V else 0, 8 * logits.H):
        of_token = n if token is None else token[n]
        z[n] = logits_at(logits, of_token, row[n].where(here[n], 0)).where(here[n], 0.0)
    return z


def write_at_ids(
    out: Tensor, ids: Tensor, token: Tensor | None, value: Tensor,
    vocab_start_index: int, ignore_index: int,
) -> None:  # fmt: skip
    if token is None:
        write_label_value(out, ids, value, vocab_start_index, ignore_index)
    else:
        write_first(out, ids, token, value, vocab_start_index)


def new_sums(logits: ShardLogits, target: Target) -> Tensor:
    """Here [k, T]: one row for each sum."""
    k = 1 + target.with_entropy + target.with_sum_z
    return logits.hidden.new_empty(k, logits.T, dtype=logits.stats_dtype)


def linear_stats(
    logits: ShardLogits, label_logit: Tensor, target: Target, *,
    cache: ColumnCache, others_max: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    reference = first_reference(label_logit)
    if target.tiles is not None:
        write_tile_stats(logits, reference, target.tiles)
    _statistics(logits, reference, target, slice(None), cache, others_max, sums)


def rescue(
    logits: ShardLogits, label_logit: Tensor, others_max: Tensor, sums: Tensor,
    target: Target, *, cache: ColumnCache,
) -> None:  # fmt: skip
    """Reads on the host which rows to compute again, so a GPU's host waits once in each forward."""
    reference = pick_reference(label_logit, others_max)
    rows = is_rescued(label_logit, others_max).nonzero().squeeze(1)
    if rows.numel() == 0:
        return
    few = logits.rows(rows)
    reference = reference[rows]
    others_max = others_max[rows]
    of_exponentials = target.rows(rows)._replace(with_sum_z=False)  # sums of x stay
    again = new_sums(few, of_exponentials)
    _statistics(few, reference, of_exponentials, rows, cache, others_max, again)
    sums[: len(again), rows] = again


def _statistics(
    logits: ShardLogits, reference: Tensor, target: Target, rows: Tensor | slice,
    cache: ColumnCache, others_max: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    """Write what ``linear_stats`` does, relative to ``reference`` [T], for T rows of the cache."""
    others_max.fill_(-torch.inf)
    sums.zero_()
    ignored = ~logits.counted
    none = torch.full_like(reference, -torch.inf)
    # So that e of an ignored row is 0.
    relative_to = reference.masked_fill(ignored, torch.inf)[:, None]
    for start, z in windows(logits):
        slope = slope_of(z, logits)
        if target.named is not None:
            first_id = logits.vocab_start_index + start
            n, token, column = named_in(target.named, first_id, z.shape[1])
            target.named.z[n] = z[token, column]
        if target.with_sum_z:
            write_at_labels(z, logits, start, reference)
            sums[-1] += (z - relative_to).sum(1)
        write_at_labels(z, logits, start, none)
        if target.named is not None:
            z[token, column] = -torch.inf
        torch.maximum(others_max, z.amax(1), out=others_max)
        x = z.sub_(relative_to)
        e = x.exp() if target.with_entropy else x.exp_()
        sums[0] += e.sum(1)
        if target.with_entropy:
            sums[1] += (e * x.clamp_min(FAR)).sum(1)
        for first, window in cache.with_starts():  # it may hold some of these columns or none
            a = max(start, first)
            b = min(start + z.shape[1], first + window.shape[1])
            if a < b:
                part = slice(a - start, b - start)
                d = e[:, part] * slope[:, part] if isinstance(slope, Tensor) else e[:, part]
                window[rows, a - first : b - first] = d.to(window.dtype)
    others_max.masked_fill_(ignored, -torch.inf)
    sums.masked_fill_(ignored, 0.0)


def token_loss(
    labels: Tensor, token_weight: Tensor | None, label_logit: Tensor,
    others_max: Tensor, sums: Tensor, terms: LossTerms, *, with_entropy: bool,
    inverse_temperature: Tensor | None = None, windows: Sequence[LabelWindow] = (),
) -> tuple[TokenStats, Tensor]:  # fmt: skip
    reference = pick_reference(label_logit, others_max)
    sum_z = sums[-1] if terms.label_smoothing else None
    sum_ez = sums[1] if with_entropy else None
    stats = TokenStats(label_logit, reference, sums[0], others_max, sum_z, sum_ez)
    loss = loss_of(stats, terms)
    if token_weight is not None:
        loss = loss * token_weight
    loss = loss.where(labels != terms.ignore_index, 0.0)
    for first_id, window in windows:
        value = label_value(stats, reference, terms, inverse_temperature)
        write_label_value(window, labels, value, first_id, terms.ignore_index)
    return stats, loss


def loss_norm(
    labels: Tensor, token_weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    weights = (labels != ignore_index).to(dtype)
    if token_weight is not None:
        weights = token_weight.where(labels != ignore_index, 0.0)
    return weights.sum().where((weights != 0).any(), 1.0)


def reduce_loss(loss: Tensor, norm: Tensor | None) -> Tensor:
    return loss.sum() if norm is None else loss.sum() / norm


def mean_loss(
    loss: Tensor, labels: Tensor, token_weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    norm = loss_norm(labels, token_weight, ignore_index, loss.dtype)
    return reduce_loss(loss, norm), norm


def scale(x: Tensor, factor: Tensor, *, out: Tensor) -> None:
    torch.mul(x, factor, out=out)


def scale_rows(
    x: Tensor, scale: Tensor | None, labels: Tensor, *,
    ignore_index: int, plus: tuple[Tensor, Tensor] | None = None, out: Tensor,
) -> None:  # fmt: skip
    for t in gemm.slices(x.shape[0], 4 * x.shape[1]):
        rows = x[t]
        if scale is not None:
            rows = rows.to(scale.dtype) * scale[t, None]
        if plus is not None:
            u, row = plus
            rows = torch.addcmul(rows.to(u.dtype), u[t, None], row.expand_as(x)[t].to(u.dtype))
        out[t] = rows.where((labels[t] != ignore_index)[:, None], 0.0)
