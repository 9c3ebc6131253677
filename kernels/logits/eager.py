"""Logits and D of ``eager.py``.  T = tokens, V = rows here, W = columns of one window."""

from collections.abc import Iterator

import torch
from torch import Tensor

from flce_dist.kernels import gemm
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.logits.target import NamedIds
from flce_dist.kernels.rows.formulas import FAR, softcap_slope
from flce_dist.torch_private.devices import assert_soon

SCRATCH_BYTES = 8 << 20  # of one [T, W] temporary; a handful live at once


def assert_in_vocabulary(labels: Tensor, counted: Tensor, vocab_size: int) -> None:
    """Assert on the device that labels are within [0, vocab_size) where they are counted."""
    in_vocabulary = (labels >= 0) & (labels < vocab_size)
    words = "labels, and ids of scores, must be within [0, vocab_size) or ignored"
    assert_soon((in_vocabulary | ~counted).all(), words)


def dlogits(
    logits: ShardLogits, reference: Tensor, label_value: Tensor,
    affine: tuple[Tensor, ...], *, out: Tensor,
) -> None:  # fmt: skip
    counted = logits.counted
    reference = reference.where(counted, torch.inf)  # so that D of an ignored row is 0
    rows = [row.where(counted, 0.0)[:, None] for row in affine]
    for start, z in windows(logits):
        slope = slope_of(z, logits)
        d = z.sub_(reference[:, None])
        if len(rows) == 3:
            a, b, u = rows
            factor = a + b * d.clamp_min(FAR)
            d.exp_().mul_(factor).add_(u)
        else:
            d.exp_()
            for a in rows:  # one or none
                d.mul_(a)
        if isinstance(slope, Tensor):
            d.mul_(slope)
        out[:, start : start + z.shape[1]] = d
    write_at_labels(out, logits, 0, label_value)


def windows(logits: ShardLogits, unit: int = 1) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(start, z)``: logits z [T, W] of columns from ``start`` on, to overwrite.

    Windows begin at multiples of ``unit``. An ignored row has the logits of a hidden state of 0.
    """
    hidden = gemm.operand(logits.hidden)
    ignored = ~logits.counted[:, None]
    may_ignore = hidden.is_cuda or bool(ignored.any())  # a CPU may look
    step = SCRATCH_BYTES // (4 * max(1, logits.T))
    step = max(unit, step - step % unit)
    for start in range(0, logits.V, step):
        window = logits.columns(start, min(start + step, logits.V))
        z = gemm.project(hidden, window.weight)
        if may_ignore:
            z.masked_fill_(ignored, 0.0)
        if logits.logit_scale != 1.0:
            z.mul_(logits.logit_scale)
        if window.bias is not None:
            z.add_(window.bias)
        z = capped(z, logits.softcap)
        if logits.inverse_temperature is not None:
            z.mul_(logits.inverse_temperature[:, None])
        yield start, z


def logits_at(logits: ShardLogits, token: Tensor | slice, column: Tensor) -> Tensor:
    """Return the logits of tokens at one column each, [n] in the dtype of statistics."""
    dtype = logits.stats_dtype
    inverse = logits.inverse_temperature
    z = logits.hidden[token].to(dtype) * logits.weight[column].to(dtype)
    z = z.sum(1) * logits.logit_scale
    if logits.bias is not None:
        z = z + logits.bias[column].to(dtype)
    z = capped(z, logits.softcap)
    return z if inverse is None else z * inverse[token]


def slope_of(z: Tensor, logits: ShardLogits) -> Tensor | float:
    """Return the softcap's derivative at logits z [T, W]; 1.0 without a softcap."""
    inverse = logits.inverse_temperature
    return softcap_slope(z, logits.softcap, None if inverse is None else inverse[:, None])


def write_label_value(
    out: Tensor, labels: Tensor, value: Tensor, vocab_start_index: int, ignore_index: int
) -> None:
    """Write ``value`` [T] to the labels' columns of ``out`` [T, W], where it has them.

    Gathers and scatters one column of every row: an index list would make the host wait.
    """
    if out.shape[1] == 0:
        return
    column = labels - vocab_start_index
    owned = (column >= 0) & (column < out.shape[1]) & (labels != ignore_index)
    column = column.where(owned, 0)[:, None]
    value = value.to(out.dtype)[:, None]
    if out.element_size() == 2:
        # As bits: on a CPU, torch copies the whole destination of a half-float scatter to fp32.
        out = out.view(torch.int16)
        value = value.view(torch.int16)
    out.scatter_(1, column, value.where(owned[:, None], out.gather(1, column)))


def write_at_labels(out: Tensor, logits: ShardLogits, start: int, value: Tensor) -> None:
    """Write ``value`` [T] to the labels' columns of ``out`` [T, W], columns from ``start`` on."""
    first = logits.vocab_start_index + start
    write_label_value(out, logits.labels, value, first, logits.ignore_index)


def named_in(named: NamedIds, first_id: int, W: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the named ids among W from ``first_id`` on: places in ``ids``, tokens, columns."""
    counts = named.end - named.begin
    token = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    listed_before = counts.cumsum(0) - counts
    n = torch.arange(len(token), device=counts.device) + (named.begin - listed_before)[token]
    column = named.ids[n] - first_id
    here = (column >= 0) & (column < W)
    return n[here], token[here], column[here]


def capped(z: Tensor, softcap: float | None) -> Tensor:
    """Return ``softcap * tanh(z / softcap)``; z itself without a softcap."""
    return z if softcap is None else softcap * torch.tanh(z / softcap)
