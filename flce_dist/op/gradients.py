"""From the matrix D of a call to its gradients: the steps that backward and in_forward share.

T = tokens on the tensor-parallel group, V = real vocabulary rows here, H = hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flce_dist.kernels import gemm
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_gradient_formulas import RowGradient
from flce_dist.op.call import Call
from flce_dist.op.dhidden import ChunkDhidden
from flce_dist.op.dlogits import Dlogits
from flce_dist.parallel.collectives import TokenSum


def in_forward_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which in_forward saves gradients: the sum over tokens may leave fp16's range."""
    return torch.float32 if dtype == torch.float16 else dtype


@dataclass
class Gradients:
    """Sums dhidden [T, H], dweight [V, H] and dbias [V] over pieces of D, those that are wanted.

    ``dweight`` has rows beyond the vocabulary's, which become 0; in the dtype in which products
    accumulate it sums several chunks of tokens, else there must be one.
    """

    call: Call
    dtype: torch.dtype  # of hidden
    dhidden: TokenSum | None
    dweight: Tensor | None
    dbias: Tensor | None

    def __post_init__(self) -> None:
        if self.dweight is not None:
            self.dweight[self.call.shard.V :] = 0.0

    def add(self, tokens: tuple[int, int], weight: Tensor, dlogits: Dlogits) -> None:
        """Take all columns of ``tokens``, once for each token.

        Hidden states are waited for where they are needed, not before: kept columns make dhidden
        without. Those that may be overwritten are, after the last logits. The sum of dhidden over
        ranks starts before the last dweight.
        """
        call, kept, made, folds = self.call, dlogits.kept, dlogits.made, dlogits.folds
        dhidden = None
        if self.dhidden is not None:
            dhidden = ChunkDhidden(call, self.dhidden, tokens, weight, dlogits)
        # Where no rank waits for the share it is written last: until then its buffer is scratch.
        late = dhidden if not call.reduces_dhidden else None
        factor = RightFactor(call, dlogits, out=None if late is None else late.share)

        def add_kept_parameters() -> None:
            for start, end, cached in kept:
                d = dlogits.piece(start, end, cached)
                self._add_parameters(start, end, d, factor, dlogits.rows, first=tokens[0] == 0)

        if dhidden is not None:
            for start, end, cached in kept:
                dhidden.add(start, end, dlogits.piece(start, end, cached))
            if kept and folds:
                dhidden.scale()
            if not made and late is None:
                dhidden.finish()
        if not folds:
            add_kept_parameters()
        for piece in made:
            start, end, cached = piece
            d = dlogits.piece(start, end, cached)
            if dhidden is not None:
                dhidden.add(start, end, d)
                if piece is made[-1] and late is None:
                    dhidden.finish()
            self._add_parameters(start, end, d, factor, dlogits.made_rows, first=tokens[0] == 0)
        if folds:
            add_kept_parameters()
        if late is not None:
            late.finish()

    def _add_parameters(
        self,
        start: int,
        end: int,
        d: Tensor,
        factor: "RightFactor",
        rows: RowGradient,
        *,
        first: bool,
    ) -> None:
        """Take D [T, end - start] of these columns, which belongs to ``rows``."""
        if self.dweight is not None:
            self._add_dweight(d, *factor.of(rows), out=self.dweight[start:end], first=first)
        if self.dbias is not None:
            self.dbias[start:end] += dbias_piece(self.call, d, rows)

    def _add_dweight(
        self, d: Tensor, hidden: Tensor, row: Tensor | None, *, out: Tensor, first: bool
    ) -> None:
        one_chunk = out.dtype == self.dtype and len(self.call.plan.chunks()) == 1
        if one_chunk:
            gemm.matmul(d.T, hidden, row=row, out=out)
            return
        gemm.add_matmul(out, d.T, hidden, first=first)
        if row is not None:
            out += row

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return dhidden of this rank's tokens, summed over ranks, dweight and dbias."""
        dhidden = None if self.dhidden is None else self.dhidden.wait().to(self.dtype)
        return dhidden, self.dweight, self.dbias


class RightFactor:
    """Hidden times each token's scale, [T, H], the right factor of dweight, made when needed.

    In the memory of hidden itself where that may be overwritten, else in ``out`` or, without one,
    in new memory; unless hidden was scaled before it was gathered.
    """

    def __init__(self, call: Call, dlogits: Dlogits, out: Tensor | None):
        self._call, self._dlogits, self._out = call, dlogits, out
        self._rows: RowGradient | None = None
        self._made: tuple[Tensor, Tensor | None]

    def of(self, rows: RowGradient) -> tuple[Tensor, Tensor | None]:
        """Return what ``right_factor`` does, with the scales of ``rows``. Waits for hidden."""
        if self._dlogits.scaled_hidden is not None:
            return self._dlogits.scaled_hidden.wait_all(), None
        if rows is not self._rows:
            assert self._dlogits.logits is not None
            logits = self._dlogits.logits.whole()
            out = logits.hidden if self._dlogits.frees_hidden else self._out
            if out is None:
                out = torch.empty_like(logits.hidden, memory_format=torch.contiguous_format)
            self._rows, self._made = rows, right_factor(self._call, logits, rows, out)
        return self._made


def right_factor(
    call: Call, logits: ShardLogits, rows: RowGradient, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return hidden times each token's scale, [T, H], the right factor of dweight, in ``out``.

    ``out`` may be hidden itself. The second result, [H], is what label smoothing adds to every row
    of dweight.
    """
    kernels, ignore_index = call.kernels, call.options.ignore_index
    hidden, labels = logits.hidden, logits.labels
    if rows.scale is None or rows.uniform is not None:
        if out is hidden:
            kernels.clear_ignored(out, labels, ignore_index=ignore_index)
        else:
            kernels.scale_rows(hidden, None, labels, ignore_index=ignore_index, out=out)
    row = None if rows.uniform is None else gemm.weighted_row_sum(rows.uniform, out)
    if rows.scale is not None:
        kernels.scale_rows(hidden, rows.scale, labels, ignore_index=ignore_index, out=out)
    return out, row


def dbias_piece(call: Call, d: Tensor, rows: RowGradient) -> Tensor:
    """Return [W]: the bias gradient of the columns of ``d`` [T, W]."""
    scale = torch.ones_like(rows.reference) if rows.scale is None else rows.scale
    dbias = gemm.weighted_row_sum(scale, d)
    if rows.uniform is not None:
        dbias = dbias + rows.uniform.sum()
    return dbias / call.options.logit_scale
