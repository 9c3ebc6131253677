"""dhidden, first of a chunk, then summed over ranks.  T = tokens, H = hidden size."""

from functools import cached_property

import torch
from torch import Tensor

from flce_dist.core.call import Call, Operands
from flce_dist.core.dlogits import Chunk, product_of
from flce_dist.core.sections import Section
from flce_dist.kernels import gemm
from flce_dist.kernels.logits.operands import rows_of
from flce_dist.kernels.rows.formulas import RowGradient
from flce_dist.parallel import transport
from flce_dist.parallel.collectives import TokenSum


def new_dhidden(
    call: Call,
    weight: Tensor,
    places: Tensor | None = None,
    *,
    in_fp32: bool = False,
    out: Tensor | None = None,
) -> TokenSum:
    """Return the sum of dhidden over ranks, with a buffer for this rank's share [T, H].

    ``out``, if given, receives the sum of this rank's tokens.
    """
    return transport.token_sum(
        (call.T, weight.shape[1]),
        _share_dtype(call, in_fp32=in_fp32),
        weight.device,
        call.tp_group if call.reduces_dhidden else None,
        sequence_parallel=call.options.sequence_parallel,
        places=places,
        T_all=call.T_all,
        out=out,
    )


def _share_dtype(call: Call, *, in_fp32: bool) -> torch.dtype:
    in_fp32 = in_fp32 or (call.options.reduce_in_fp32 and call.reduces_dhidden)
    return call.stats_dtype if in_fp32 else call.dtype


class HiddenGradient:
    """dhidden of this rank's tokens, summed over ranks, in the operands' dtype.

    If it ``keeps_fp32`` it is in the dtype of statistics. Of a call that ``is_cut`` each section
    begins before its chunks, and the sum over ranks of its dhidden overlaps the next one.
    """

    def __init__(self, call: Call, operands: Operands, *, keeps_fp32: bool, is_cut: bool):
        self.call = call
        self.keeps_fp32 = keeps_fp32
        self.weight = operands.weight
        self._sum: TokenSum | None = None  # of the call, or of a section once that has begun
        self._of_sections: Tensor | None = None  # all that is returned, if the call is cut
        self._of_section: Tensor | None = None  # the rows whose sum is under way
        if is_cut:
            dtype = call.stats_dtype if keeps_fp32 else call.dtype
            self._of_sections = operands.hidden.new_empty(operands.hidden.shape, dtype=dtype)
        else:
            self._sum = new_dhidden(call, self.weight, operands.places, in_fp32=keeps_fp32)

    @property
    def sum(self) -> TokenSum:
        """The sum over ranks; its ``tokens`` [T, H] are this rank's share."""
        assert self._sum is not None
        return self._sum

    @cached_property
    def sum_of_weight(self) -> Tensor:
        """The sum [H] of weight's real rows here, in the dtype of statistics."""
        weight = self.weight[: self.call.V]
        ones = weight.new_ones(len(weight), dtype=self.call.stats_dtype)
        return gemm.weighted_row_sum(ones, weight)

    def begin(self, section: Section) -> None:
        """End the sum of the last section's dhidden over ranks, and begin that of this one."""
        assert self._of_sections is not None
        self._end_section()
        self._of_section = self._of_sections[section.rows]
        in_fp32 = self.keeps_fp32
        is_rounded = self._of_section.dtype != _share_dtype(section.call, in_fp32=in_fp32)
        out = None if is_rounded else self._of_section
        self._sum = new_dhidden(section.call, self.weight, in_fp32=in_fp32, out=out)

    def _end_section(self) -> None:
        """Wait for a section's dhidden; round it where shares are wider than the gradient."""
        if self._sum is None or self._of_section is None:
            return
        total = self._sum.wait()
        if total.dtype != self._of_section.dtype:
            self._of_section.copy_(total)

    def finished(self) -> Tensor:
        """Wait for the sum over ranks, and return dhidden of this rank's tokens."""
        if self._of_sections is not None:
            self._end_section()
            dhidden = self._of_sections
        else:
            dhidden = self.sum.wait()
        return dhidden if self.keeps_fp32 else dhidden.to(self.call.dtype)


class ChunkOfHidden:
    """dhidden of a chunk: ``acc`` [T, H] in the dtype of statistics, to which its GEMMs add.

    ``scratch`` [T, H], if not None, may be used for anything until dhidden is finished, which then
    comes after dweight.
    """

    def __init__(self, gradient: HiddenGradient, chunk: Chunk, rows: RowGradient):
        self._gradient = gradient
        self._tokens = chunk.tokens
        self._labels = chunk.labels
        self._rows = rows
        call = gradient.call
        self._product = product_of(call, chunk)
        share = rows_of(gradient.sum.tokens, *chunk.tokens)
        self.scratch: Tensor | None = None
        if gradient.keeps_fp32 and not call.reduces_dhidden:
            self.acc = share
        else:
            self.acc = torch.empty_like(share, dtype=call.stats_dtype)
            self.scratch = None if call.reduces_dhidden else share

    def add(self, start: int, end: int, d: Tensor) -> None:
        """Add the part of ``d`` [T, end - start], D of these columns; they come in order."""
        weight = rows_of(self._gradient.weight, start, end)
        self._product(d, weight, sums_tokens=False, out=self.acc, adds=start > 0)
        if end == self._gradient.call.V:
            self.columns_done()

    def columns_done(self) -> None:
        """Finish if nothing needs ``scratch``, so that the sum over ranks overlaps dweight."""
        if self.scratch is None:
            self.finish()

    def dweight_done(self) -> None:
        """Finish if that was left until dweight has used ``scratch``."""
        if self.scratch is not None:
            self.finish()

    def finish(self) -> None:
        """Round the accumulator into this rank's share; after the last chunk start the sum."""
        call = self._gradient.call
        rows = self._rows
        plus = None
        if rows.uniform is not None:
            plus = rows.uniform, self._gradient.sum_of_weight
        total = self._gradient.sum
        total.acquire()
        out = rows_of(total.tokens, *self._tokens)
        ignore_index = call.options.ignore_index
        call.kernels.scale_rows(
            self.acc, rows.scale, self._labels, ignore_index=ignore_index, plus=plus, out=out
        )
        del self.acc  # freed before the peers' shares get buffers
        if self._tokens[1] == len(total.tokens):
            total.start()
