"""The functions of ``divergence/gpu.py``, whose docstrings hold here, in plain PyTorch.

T = tokens, V = vocabulary rows here, W = columns of one window.
"""

import torch
from torch import Tensor

from flce_dist.kernels import gemm
from flce_dist.kernels.divergence.formulas import (  # noqa: F401
    METRIC_ROWS,
    Measure,
    PairStats,
    stats_of_totals,
)
from flce_dist.kernels.logits.eager import slope_of, windows
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.rows.formulas import finite


def pair_logits(
    logits: ShardLogits, *,
    out: Tensor | None, rows: Tensor, first: Tensor | None = None, first_max: Tensor | None = None,
) -> None:  # fmt: skip
    largest = torch.full_like(rows[0], -torch.inf)
    total = torch.zeros_like(rows[0])
    weighted = torch.zeros_like(total)
    for start, z in windows(logits):
        here = slice(start, start + z.shape[1])
        if out is not None:
            out[:, here] = z
        before = largest
        largest = torch.maximum(before, z.amax(1))
        reference = finite(largest)
        total = total * (before - reference).exp() + (z - reference[:, None]).exp().sum(1)
        if first is not None and first_max is not None:
            w = (first[:, here] - finite(first_max)[:, None]).exp()
            weighted += _weighted(w, first[:, here] - z).sum(1)
    rows[0] = largest
    rows[1] = total
    if first is not None:
        rows[2] = weighted


def pair_sums(
    s: Tensor, t: Tensor, logits: ShardLogits, stats: PairStats, measure: Measure, *,
    with_metrics: bool, is_invariant: bool,
) -> Tensor:  # fmt: skip
    assert not is_invariant, "sums of any order"
    T, V = s.shape
    rows = measure.sums + METRIC_ROWS * with_metrics
    sums = torch.zeros(rows, T, dtype=torch.float64, device=s.device)
    if with_metrics:
        sums[[-4, -2]] = -torch.inf
    for at in gemm.slices(T if V else 0, 4 * V):
        log_p, log_q, d = _differences(s[at], t[at], stats.tokens(at.start, at.stop))
        p = log_p.exp()
        q = log_q.exp()
        for row, terms in enumerate(_terms(p, q, d, measure)):
            sums[row, at] = terms.sum(1).double()
        if with_metrics:
            above = _terms(p, q, d, Measure("tv", 0.0))[0]
            metrics = (_weighted(p, -log_p), _weighted(q, -log_q), above)
            for row, terms in enumerate(metrics, measure.sums):
                sums[row, at] = terms.sum(1).double()
            for row, z in ((-4, s[at]), (-2, t[at])):
                largest = z.max(1)
                sums[row, at] = largest.values.double()
                sums[row + 1, at] = (largest.indices + logits.vocab_start_index).double()
    return sums


def pair_dlogits(
    s: Tensor, t: Tensor, logits: ShardLogits, stats: PairStats, measure: Measure, scale: Tensor, *,
    out: Tensor,
) -> None:  # fmt: skip
    T, V = s.shape
    for at in gemm.slices(T if V else 0, 4 * V):
        log_p, log_q, d = _differences(s[at], t[at], stats.tokens(at.start, at.stop))
        p = log_p.exp()
        centre = stats.centre[at, None]
        if measure.kind == "forward_kl":
            dz = p - log_q.exp()
        elif measure.kind == "reverse_kl":
            dz = _weighted(p, d - centre)
        elif measure.kind == "jsd":
            _, of_student = _log_ratios(d, measure.beta)
            dz = (1 - measure.beta) * _weighted(p, of_student - centre)
        else:
            dz = p * ((d > 0).to(p.dtype) - centre)
        dz = dz * scale[at, None] * slope_of(s[at], logits.rows(at))
        out[at] = dz.where(logits.counted[at, None], 0.0).to(out.dtype)


def _differences(s: Tensor, t: Tensor, stats: PairStats) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p, log q and d, [T, W] each."""
    s = s - stats.top[:, None]
    t = t - stats.teacher_top[:, None]
    d = (s - t) - stats.shift[:, None]
    return s - stats.log_total[:, None], t - stats.teacher_log_total[:, None], d


def _terms(p: Tensor, q: Tensor, d: Tensor, measure: Measure) -> tuple[Tensor, ...]:
    if measure.kind == "forward_kl":
        return (_weighted(q, -d),)
    if measure.kind == "reverse_kl":
        return (_weighted(p, d),)
    if measure.kind == "jsd":
        of_teacher, of_student = _log_ratios(d, measure.beta)
        return _weighted(q, of_teacher), _weighted(p, of_student)
    above = d > 0
    return (p * -(-d).expm1()).where(above, 0.0), p.where(above, 0.0)


def _log_ratios(d: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return ``log(q / m)`` and ``log(p / m)``."""
    is_above = d > 0
    distance = d.abs()
    share = torch.full_like(d, 1 - beta).masked_fill_(is_above, beta)
    of_larger = -(share * (-distance).expm1()).log1p()
    of_smaller = of_larger - distance
    return of_smaller.where(is_above, of_larger), of_larger.where(is_above, of_smaller)


def _weighted(p: Tensor, x: Tensor) -> Tensor:
    """Return p x, but 0 where p is 0: there x may be infinite or NaN."""
    return (p * x).where(p != 0.0, 0.0)
