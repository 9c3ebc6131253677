"""Filtered gradients in Triton: of kept tiles a round at a time, and by rank one of the others.

T = tokens of the group, V = real rows here, H = hidden size, J = tiles of columns.
"""

import torch
from torch import Tensor

from flce_dist.core.call import Call
from flce_dist.core.dlogits import Chunk
from flce_dist.core.gradients import Gradients, dweight_factor
from flce_dist.kernels import gemm
from flce_dist.kernels.filtered import gpu as kernels
from flce_dist.kernels.filtered.tile_lists import TileLists
from flce_dist.kernels.filtered.tiles import TILE_V
from flce_dist.kernels.logits.operands import rows_of
from flce_dist.kernels.rows.formulas import RowGradient, root_of_large


def add_tiles(gradients: Gradients, chunk: Chunk, kept: Tensor, mass: Tensor) -> None:
    """Write all gradients: those of kept tiles a round at a time, added to those of the others.

    What needs no hidden comes first, while that is being gathered. The sum of dhidden over ranks
    overlaps the last dweight GEMM.
    """
    logits = chunk.logits
    scale = chunk.rows.scale
    assert logits is not None and scale is not None and chunk.gather is not None
    capacity = max(2, chunk.window_v // TILE_V) * len(kept)
    lists = kernels.tile_lists(kept, capacity)
    sample = kernels.profile_sample(logits.labels, scale, ignore_index=logits.ignore_index)
    dbias = None
    if gradients.dbias is not None:
        dbias = _TileDbias(gradients.dbias[: logits.V], scale, mass)
    scale_of_d, rows = _parted_scale(gradients.call, chunk.rows, scale)

    chunk.gather.wait()
    total = kernels.tile_profile(logits, rows.reference, kept, sample)
    dhidden = gradients.dhidden_of(chunk, rows)
    profile, means, mass = kernels.rank_one(
        logits, total, mass, scale_of_d, with_means=dhidden is not None
    )
    if dhidden is not None and means is not None:
        gemm.add_matmul(dhidden.acc, mass.T, means, first=True)
    dweight = None
    if gradients.dweight is not None:
        scratch = None if dhidden is None else dhidden.scratch
        dweight = _TileDweight(gradients, chunk, rows, profile, mass, scratch)
    if dbias is not None:
        dbias.begin(profile)
    buffer = kernels.new_kept_buffer(logits, capacity)
    for round in range(lists.rounds):
        d = kernels.kept_dlogits(logits, rows, scale_of_d, lists, round, out=buffer)
        if dhidden is not None:
            kernels.add_kept_dhidden(d, logits.weight, lists, round, dhidden.acc)
            if round == lists.rounds - 1:
                dhidden.columns_done()
        if dweight is not None:
            dweight.add(d, lists, round)
        if dbias is not None:
            kernels.add_kept_dbias(d, rows.scale, lists, round, dbias.out)
    if dhidden is not None:
        dhidden.dweight_done()
    if dbias is not None:
        dbias.finish(rows.uniform, gradients.call.options.logit_scale)


def _parted_scale(call: Call, rows: RowGradient, scale: Tensor) -> tuple[Tensor, RowGradient]:
    """Return what D is to contain of the scale, and factors whose scale is what it lacks.

    fp16 would flush D times a small scale: there dhidden is scaled at the end.
    """
    if not call.is_fp16:
        return scale, rows._replace(scale=None)
    root = root_of_large(scale)
    return root, rows._replace(scale=scale / root)


class _TileDweight:
    """dweight of a chunk's tiles; each round writes the rows of its own."""

    def __init__(
        self,
        gradients: Gradients,
        chunk: Chunk,
        rows: RowGradient,
        profile: Tensor,
        mass: Tensor,
        scratch: Tensor | None,
    ):
        """``profile`` [V] and ``mass`` [J, T] are the factors of D in tiles that are not kept."""
        assert gradients.dweight is not None
        self._call = gradients.call
        self._adds = gradients.accumulates
        self._columns = gradients.dweight.shape[1]
        self._out = rows_of(gradients.dweight, 0, len(profile))
        self._chunk = chunk
        self._rows = rows
        self._profile = profile
        self._mass = mass
        self._scratch = scratch
        self._hidden: Tensor | None = None  # from the first round on, as the next ones
        self._hidden_of_tiles: Tensor | None = None  # [J, H], weighted by ``mass``
        self._row: Tensor | None = None  # what smoothing adds to each row

    def add(self, d: Tensor, lists: TileLists, round: int) -> None:
        """Write the rows of a round, whose D is packed in ``d``."""
        if self._hidden is None:
            self._begin()
        assert self._hidden is not None and self._hidden_of_tiles is not None
        kernels.kept_dweight(
            d,
            self._hidden,
            lists,
            round,
            self._profile,
            self._hidden_of_tiles,
            self._row,
            out=self._out,
            accumulates=self._adds,
        )

    def _begin(self) -> None:
        hidden, self._row = dweight_factor(
            self._call,
            self._chunk,
            self._rows,
            columns=self._columns,
            # Ignored rows of gathered hidden may be cleared in place: D of these rows is 0.
            in_place=self._rows.scale is None,
            scratch=self._scratch,
        )
        of_tiles = hidden.new_empty(len(self._mass), hidden.shape[1], dtype=self._call.stats_dtype)
        gemm.add_matmul(of_tiles, self._mass, hidden, first=True)
        self._hidden = hidden
        self._hidden_of_tiles = of_tiles


class _TileDbias:
    """dbias of a chunk's tiles, ``out`` [V], to which the kernel adds that of kept ones."""

    def __init__(self, out: Tensor, scale: Tensor, mass: Tensor):
        self.out = out
        self._of_tiles = gemm.weighted_row_sum(scale, mass.T)  # [J], of those that are not kept

    def begin(self, profile: Tensor) -> None:
        """Write what follows from tiles that are not kept."""
        of_rows = self._of_tiles.repeat_interleave(TILE_V)[: len(self.out)]
        torch.mul(profile, of_rows, out=self.out)

    def finish(self, uniform: Tensor | None, logit_scale: float) -> None:
        """Add what smoothing does, and take the product's scale out, which a bias has not."""
        if uniform is not None:
            self.out += uniform.sum()
        self.out /= logit_scale
