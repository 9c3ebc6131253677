"""A head to compare with: gradients of likely tiles, and none of the others.

The loss is exact. Its gradients are computed in tiles of 128 tokens by 256 vocabulary rows that
hold a label or a probability of eps or more, and left out elsewhere, as Cut Cross-Entropy
(arXiv:2411.09009) leaves out its blocks. Plain PyTorch, four GEMMs, logits of 2048 tokens at a time
in fp32, or in fp64 for fp64 operands. T tokens, one sequence after the other as in the fused layer;
all of them count. V vocabulary rows, H hidden size.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flce_dist.testing.filtered_gradients import TILE_T, TILE_V
from flce_dist.vocab_order import rows_of

CHUNK = 16 * TILE_T
SHARES = ("kept_share", "rank_one_mass", "dropped_mass")
"""What a head with head.filter_eps says of a step."""


class DroppedMetrics(NamedTuple):
    """Scalars on the device."""

    kept_share: Tensor  # of the tiles
    dropped_mass: Tensor  # mean over tokens of the probability in the others


def drop_tiles(layer: Any, eps: float) -> None:
    """Make an output layer of the plug-in, on one tensor-parallel rank, drop tiles below ``eps``.

    Its ``last_metrics`` are then ``DroppedMetrics``.
    """
    assert layer.tp_group.size() == 1
    layer.token_loss = functools.partial(_token_loss, layer, eps)


def _token_loss(
    layer: Any, eps: float, hidden: Tensor, weight: Tensor, labels: Tensor, *, scale: float = 1.0
) -> Tensor:
    """Return the loss of ``labels`` [s, b] as [s, b] fp32; ``hidden`` is [s, b, H]."""
    assert scale == 1.0, "no model of launch/train scales its logits"
    if layer.row_of_token is not None:
        labels = rows_of(labels, layer.row_of_token)
    loss, *metrics = dropped_tiles_loss(
        hidden.transpose(0, 1).flatten(0, 1),
        weight,
        labels.T.flatten(),
        eps,
        layer.gradient_accumulation_fusion,
    )
    layer.last_metrics = DroppedMetrics(*metrics)
    return loss.view(labels.T.shape).T


def dropped_tiles_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, eps: float, accumulates: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [T], and the share of tiles kept and the mean mass in the others.

    ``hidden`` is [T, H], ``weight`` [V, H], ``labels`` [T] int64. With ``accumulates`` backward
    adds dweight to ``weight.main_grad``, by Megatron's protocol.
    """
    loss, kept_share, mass = _DroppedTiles.apply(hidden, weight, labels, eps, accumulates)
    return loss, kept_share, mass


class _DroppedTiles(torch.autograd.Function):
    """``dz = kept * (softmax(z) - onehot) * dloss``; lse [T], kept [blocks, tiles] are saved."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, eps: float, accumulates: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss = hidden.new_empty(len(hidden), dtype=_acc_dtype(hidden))
        lse, mass = torch.empty_like(loss), torch.empty_like(loss)
        kept_blocks = []
        for here in _chunks(len(hidden)):
            z = _logits(hidden[here], weight)
            lse[here] = z.logsumexp(1)
            loss[here] = lse[here] - z.gather(1, labels[here, None]).squeeze(1)
            p = _tiles(z.sub_(lse[here, None]).exp_())
            kept = p.amax((1, 3)) >= eps
            block = torch.arange(len(z), device=z.device) // TILE_T
            kept[block, labels[here] // TILE_V] = True
            mass[here] = (p.sum(3) * ~kept[:, None]).sum(2).flatten()[: len(z)]
            kept_blocks.append(kept)
        kept = torch.cat(kept_blocks)
        ctx.save_for_backward(hidden, weight, labels, lse, kept)
        ctx.parameter = weight if accumulates else None
        metrics = kept.float().mean(), mass.mean()
        ctx.mark_non_differentiable(*metrics)
        return loss, *metrics

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse, kept = ctx.saved_tensors
        dloss, *_ = upstream
        dhidden = torch.empty_like(hidden)
        dweight = torch.zeros_like(weight, dtype=_acc_dtype(weight))
        for here in _chunks(len(hidden)):
            dz = _logits(hidden[here], weight).sub_(lse[here, None]).exp_()
            dz[torch.arange(len(dz), device=dz.device), labels[here]] -= 1.0
            dz *= dloss[here, None]
            blocks = kept[here.start // TILE_T :][: -(-len(dz) // TILE_T)]
            columns = blocks.repeat_interleave(TILE_V, 1)[:, : len(weight)]
            dz *= columns.repeat_interleave(TILE_T, 0)[: len(dz)]
            rounded = dz.to(hidden.dtype)
            torch.mm(rounded, weight, out=dhidden[here])
            _add_gemm(dweight, rounded.T, hidden[here])
        return dhidden, _given_to_main_grad(ctx.parameter, dweight, weight.dtype), None, None, None


def _chunks(T: int) -> Iterator[slice]:
    for start in range(0, T, CHUNK):
        yield slice(start, min(start + CHUNK, T))


def _acc_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return [T, V], not rounded to half precision."""
    acc_dtype = _acc_dtype(hidden)
    if hidden.is_cuda and hidden.dtype != acc_dtype:
        return torch.mm(hidden, weight.T, out_dtype=acc_dtype)
    return hidden.to(acc_dtype) @ weight.to(acc_dtype).T


def _add_gemm(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``acc``, not rounded to half precision."""
    if a.is_cuda and a.dtype != acc.dtype:
        torch.addmm(acc, a, b, out_dtype=acc.dtype, out=acc)
    else:
        acc.addmm_(a.to(acc.dtype), b.to(acc.dtype))


def _tiles(x: Tensor) -> Tensor:
    """View [T, V], padded to whole tiles by zeros, as [blocks, TILE_T, tiles, TILE_V]."""
    padding = (0, -x.shape[1] % TILE_V, 0, -x.shape[0] % TILE_T)
    if any(padding):
        x = F.pad(x, padding)
    return x.unflatten(1, (-1, TILE_V)).unflatten(0, (-1, TILE_T))


def _given_to_main_grad(weight: Any, dweight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Add dweight to the weight's ``main_grad`` and return what autograd gets; None: no such."""
    if weight is None:
        return dweight.to(dtype)
    weight.main_grad += dweight
    weight.grad_added_to_main_grad = True
    return torch.zeros((), dtype=dtype, device=weight.device).expand(weight.shape)
