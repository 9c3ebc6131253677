"""Logits and D in plain PyTorch, a window of columns at a time; see ``eager.py``.

T = tokens, V = vocabulary rows here, W = columns of one window.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from flce_dist.kernels import gemm
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_gradient_formulas import softcap_grad
from flce_dist.kernels.token_loss_formulas import FAR

SCRATCH_BYTES = 8 << 20  # of one [T, W] temporary; a handful live at once


def dlogits(
    logits: ShardLogits,
    reference: Tensor,
    label_value: Tensor,
    affine: tuple[Tensor, ...],
    *,
    out: Tensor,
) -> None:
    """Write D to ``out`` [T, V], as ``dlogits.py`` says."""
    rows = [row[:, None] for row in affine]
    for start, z, other in windows(logits):
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


def windows(logits: ShardLogits, unit: int = 1) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield ``(start, z [T, W], other [T, W])``; other is False at labels and in ignored rows.

    Windows begin at multiples of ``unit`` columns.
    """
    hidden = gemm.operand(logits.hidden)
    counted = logits.counted[:, None]
    step = SCRATCH_BYTES // (4 * max(1, logits.T))
    step = max(unit, step - step % unit)
    for start in range(0, logits.V, step):
        window = logits.columns(start, start + step)
        z = gemm.project(hidden, window.weight) * logits.logit_scale
        if window.bias is not None:
            z = z + window.bias.to(z.dtype)
        z = capped(z, logits.softcap)
        column = torch.arange(window.V, device=z.device) + window.vocab_start_index
        yield start, z, (column != logits.labels[:, None]) & counted


def capped(z: Tensor, softcap: float | None) -> Tensor:
    return z if softcap is None else softcap * torch.tanh(z / softcap)
