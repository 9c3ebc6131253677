"""The functions of ``eager.py`` that read no logits.  T = tokens, V = vocabulary rows here."""

import torch
from torch import Tensor

from flce_dist.kernels import gemm
from flce_dist.kernels.token_gradient_formulas import label_value
from flce_dist.kernels.token_loss_formulas import LossTerms, TokenStats, loss_of, pick_reference


def token_loss(
    labels: Tensor, token_weight: Tensor | None, label_logit: Tensor,
    others_max: Tensor, sums: Tensor, terms: LossTerms, *, with_entropy: bool,
    inverse_temperature: Tensor | None = None,
) -> tuple[TokenStats, Tensor, Tensor]:  # fmt: skip
    reference = pick_reference(label_logit, others_max)
    sum_z = sums[-1] if terms.label_smoothing else None
    sum_ez = sums[1] if with_entropy else None
    stats = TokenStats(label_logit, reference, sums[0], others_max, sum_z, sum_ez)
    loss = loss_of(stats, terms)
    if token_weight is not None:
        loss = loss * token_weight
    loss = loss.where(labels != terms.ignore_index, 0.0)
    return stats, loss, label_value(stats, reference, terms, inverse_temperature)


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


def write_label_value(
    out: Tensor, labels: Tensor, value: Tensor, vocab_start_index: int, ignore_index: int
) -> None:
    """Gathers and scatters one column of every row: an index list would make the host wait."""
    if out.shape[1] == 0:
        return
    column = labels - vocab_start_index
    owned = (column >= 0) & (column < out.shape[1]) & (labels != ignore_index)
    column = column.where(owned, 0)[:, None]
    value = value.to(out.dtype)[:, None]
    if out.element_size() == 2:
        # As bits: on a CPU, torch copies the whole destination of a half-float scatter to fp32.
        out, value = out.view(torch.int16), value.view(torch.int16)
    out.scatter_(1, column, value.where(owned[:, None], out.gather(1, column)))


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
            rows = torch.addcmul(rows, u[t, None], row)
        out[t] = rows.where((labels[t] != ignore_index)[:, None], 0.0)
