"""The schedule of filtered gradients: exact in the tiles that are kept, rank one in the others.

Forward decides which tiles are kept, and saves each token's probability in the others, its mass s
[tiles, T]. There p is replaced by ``s[j, t] q[v]``, with the profile q of tile j, which sums to 1
over its rows. T = tokens of the group, V = real rows here.
"""

from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from flce_dist.arguments import values
from flce_dist.arguments.options import LossOptions
from flce_dist.core.call import Call, Operands
from flce_dist.core.dlogits import Chunk
from flce_dist.core.gradients import Gradients, row_gradient
from flce_dist.core.interface import Backward, Outputs, Results, Saved, registered
from flce_dist.core.statistics import Pass, finished
from flce_dist.kernels.filtered import eager
from flce_dist.kernels.filtered.interface import tile_kernels_of
from flce_dist.kernels.filtered.tiles import tile_grid
from flce_dist.kernels.logits.operands import ColumnCache, ShardLogits
from flce_dist.kernels.rows.formulas import TokenStats, root_of_large
from flce_dist.parallel import collectives
from flce_dist.schedules.windows import Windows, WindowsSaved, closed
from flce_dist.torch_private.compiling import constant_in_graphs


class FilteredSaved(NamedTuple):
    norm: Tensor | None  # of a mean, a scalar
    label_logit: Tensor  # [T], as the next two
    reference: Tensor
    others: Tensor
    kept: Tensor  # which tiles, [blocks, tiles] bool
    mass: Tensor  # each token's probability in tiles that are not kept, [tiles, T]


class FilteredLossWithMetrics(NamedTuple):
    """``LossWithMetrics``, and two scalars, the same on every rank and without gradients."""

    loss: Tensor
    lse: Tensor
    logprob: Tensor
    entropy: Tensor
    correct: Tensor
    kept_share: Tensor  # of all ranks' tiles, those whose gradients are exact
    rank_one_mass: Tensor  # mean over counted tokens of the probability in the others


def schedule(eps: float) -> "Filter":
    """Return the value of ``schedule`` that approximates the gradients, not the loss; experimental.

    Of tiles of 128 tokens by 256 vocabulary rows without a label or a probability of ``eps`` or
    more, the gradients use the tile's mean row, so that two GEMMs skip it. Saves time only if rows
    of like frequency lie together; docs/filtered_gradients.md says how to choose ``eps``, in
    [0, 1), and when not to. 0.0 keeps every tile, which is schedule "recompute" in every bit.
    With ``max_counted`` or ``skip_ignored`` tiles are of tokens that count, one after the other, so
    other tiles are kept than without. Excludes softcap, tp_invariant and gradients of metrics.
    In code that torch.compile compiles ``eps`` is a constant.

    Raises:
        ValueError: eps is no number within [0, 1).

    Example::

        loss = linear_cross_entropy(hidden, weight, labels, schedule=filtered.schedule(2**-12))
    """
    is_number = isinstance(eps, Real) and not isinstance(eps, bool)
    if not is_number or not 0.0 <= eps < 1.0:
        got = values.shown(eps)
        raise ValueError(f"eps of filtered.schedule must be a float within [0, 1), got {got}")
    unsized = Filter(float(eps), f"filtered.schedule({float(eps)})")
    _register(unsized.eps, unsized.name)
    return unsized


@constant_in_graphs  # traced, it would not be registered in time
def _register(eps: float, name: str) -> None:
    registered(Filter(eps, name))


@dataclass(frozen=True)
class Filter:
    """What ``schedule`` of a call may be: filtered gradients, before the call's sizes are known."""

    eps: float
    name: str = field(repr=False)

    results: ClassVar[type[Any]] = FilteredLossWithMetrics

    @property
    def is_recompute(self) -> bool:
        """Whether every tile is kept."""
        return self.eps == 0.0

    def refuse(self, options: LossOptions) -> None:
        if options.softcap is not None:
            raise NotImplementedError(
                "filtered.schedule needs softcap=None, since a softcap's slope differs between the "
                f"columns of a tile, got softcap={options.softcap}"
            )
        if options.tp_invariant:
            raise NotImplementedError(
                "filtered.schedule needs tp_invariant=False, since tiles are counted from the "
                "first row of each rank, got tp_invariant=True"
            )

    def sized(self, recompute: Windows) -> "Filtered":
        return Filtered(self.eps, recompute)


@dataclass(frozen=True)
class Filtered:
    """Recompute, but exact only in tiles that hold a label or a probability of ``eps`` or more.

    Forward: that of recompute, and one pass over the maxima and sums of tiles [2, V / 256, T]. With
    metrics an all-reduce of three numbers.
    Backward: of three GEMMs of 2 T H V flop the tiles that are kept, whose D takes the memory of
    recompute's window, and rank-one terms by two GEMMs of 1 / 256 of that.
    """

    eps: float
    recompute: Windows

    keeps_operands: ClassVar[bool] = True
    skips_ignored: ClassVar[bool] = False

    @property
    def _is_exact(self) -> bool:
        return self.eps == 0.0 or self.recompute.T == 0

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Outputs, Saved]:
        if self._is_exact:
            loss, metrics, saved = self.recompute.forward(call, operands)
            scalars = (loss.new_ones(()), loss.new_zeros(())) if call.options.with_metrics else ()
            return loss, (*metrics, *scalars), saved
        kernels = tile_kernels_of(call.impl)
        forward_pass = Pass(call, operands)
        tokens = (0, call.T)
        tiles = kernels.new_tile_stats(forward_pass.logits)
        forward_pass.target = forward_pass.target._replace(tiles=tiles)
        stats, loss = forward_pass.chunk_loss(tokens, ColumnCache())
        kept, mass = kernels.kept_tiles(forward_pass.logits, tiles, stats, self.eps)
        of_pass = forward_pass.metrics(stats, tokens)
        loss, metrics, norm = finished(call, operands, [loss], [of_pass])
        outputs = *metrics, *_approximation(call, forward_pass.logits, kept, mass)
        saved = FilteredSaved(norm, stats.label_logit, stats.reference, stats.others, kept, mass)
        return loss, outputs, saved

    def saved_like(self, call: Call, operands: Operands) -> Saved:
        saved = WindowsSaved(*self.recompute.saved_like(call, operands))
        if self._is_exact:
            return saved
        blocks, tiles = tile_grid(call.T, call.V)
        kept = operands.hidden.new_empty(blocks, tiles, dtype=torch.bool)
        mass = operands.hidden.new_empty(tiles, call.T)
        return FilteredSaved(
            saved.norm, saved.label_logit, saved.reference, saved.others, kept, mass
        )

    def backward(self, request: Backward) -> Results:
        if self._is_exact:
            return self.recompute.backward(request)
        if request.upstream.of_metrics:
            raise NotImplementedError(
                "filtered.schedule has gradients of the loss only, and a gradient of lse, logprob "
                "or entropy was asked for; use schedule='auto'"
            )
        norm, *of_tokens, kept, mass = FilteredSaved(*request.saved)
        stats = TokenStats(*of_tokens)
        rows = row_gradient(request, stats, norm, from_lse=True)
        # Without columns there is a share of zeros, for which the other ranks wait.
        gradients, chunk = self.recompute.opened(request, stats.reference, rows, None)
        if not request.call.V:
            gradients.add(chunk)
        elif request.call.impl == "triton":
            from flce_dist.filtered.tile_gradients import add_tiles  # imports Triton

            add_tiles(gradients, chunk, kept, mass)
        else:
            _add_dense(gradients, chunk, kept, mass)
        return closed(gradients, chunk)


def _approximation(
    call: Call, logits: ShardLogits, kept: Tensor, mass: Tensor
) -> tuple[Tensor, ...]:
    """Return the share of all ranks' tiles that are kept, and the mean mass in the others."""
    if not call.options.with_metrics:
        return ()
    counted = logits.counted.sum()
    sums = mass.new_full((3,), kept.numel(), dtype=logits.stats_dtype)
    sums[0] = kept.sum()
    sums[1] = mass.sum(dtype=sums.dtype)
    kept_sum, left, tiles = collectives.all_reduce_sum(sums, call.tp_group)
    return kept_sum / tiles, left / counted.clamp_min(1)


def _add_dense(gradients: Gradients, chunk: Chunk, kept: Tensor, mass: Tensor) -> None:
    """Write all gradients from a D that contains the tiles that are not kept, in plain PyTorch."""
    logits = chunk.logits
    rows = chunk.rows
    assert logits is not None and rows.scale is not None and chunk.gather is not None
    sample = eager.profile_sample(logits.labels, rows.scale, ignore_index=logits.ignore_index)
    chunk.gather.wait()
    total = eager.tile_profile(logits, rows.reference, kept, sample)
    scale = rows.scale  # as in the other tiles of D
    if gradients.call.is_fp16:
        scale = root_of_large(scale)
        rows = rows.half_folded()
    elements = eager.RankOne(logits, total, kept, mass, scale)
    gradients.add(chunk._replace(rows=rows, elements=elements))
