"""dhidden of a chunk of tokens: this shard's share, and its way into the sum over ranks.

T = tokens of the chunk, V = real vocabulary rows here, H = hidden size.
"""

from torch import Tensor

from flce_dist.kernels import gemm
from flce_dist.op.call import Call
from flce_dist.op.dlogits import Dlogits
from flce_dist.parallel.collectives import TokenSum


class ChunkDhidden:
    """Adds up ``D @ weight`` over pieces of columns, [T, H], and starts the sum over ranks.

    Where that is one product and the sum brings in the tokens' scales, the product is the share as
    it is. Else an accumulator takes the products and is turned into the share at the end; until
    then the share's memory is free.
    """

    def __init__(
        self,
        call: Call,
        total: TokenSum,
        tokens: tuple[int, int],
        weight: Tensor,
        dlogits: Dlogits,
    ):
        self._call, self._total, self._tokens = call, total, tokens
        self._weight, self._dlogits = weight, dlogits
        self._is_product = total.scales and call.is_one_product(tokens, weight)
        self.share = total.tokens[slice(*tokens)]
        total.acquire()
        self._acc = self.share
        if not self._is_product:
            dtype = gemm.acc_dtype(weight.dtype)
            self._acc = total.accumulator(len(self.share), dtype)

    def add(self, start: int, end: int, d: Tensor) -> None:
        """Take D [T, end - start] of these columns, the first ones first."""
        weight = self._weight[start:end]
        if self._is_product and self.share.dtype == d.dtype:
            gemm.matmul(d, weight, out=self.share)
        else:
            gemm.add_matmul(self._acc, d, weight, first=start == 0)

    def scale(self) -> None:
        """Bring the scales into what was taken so far, ahead of D that has them inside."""
        self._write(slice(None), self._dlogits.rows.scale, None, out=self._acc)

    def finish(self) -> None:
        """Turn what was taken into this shard's share, and begin to sum over ranks."""
        if self._is_product:
            self._total.start(*self._tokens, scale=self._dlogits.rows.scale)
            return
        rows, plus = self._dlogits.made_rows, None
        if rows.uniform is not None:
            V = self._call.shard.V
            plus = gemm.weighted_row_sum(rows.uniform.new_ones(V), self._weight[:V])
        for block in self._total.blocks(len(self.share)):
            self._write(block, rows.scale, plus, out=self.share[block])
        self._acc = self.share  # the accumulator's memory may hold what comes from other ranks
        self._total.start(*self._tokens)

    def _write(self, t: slice, scale: Tensor | None, row: Tensor | None, out: Tensor) -> None:
        uniform = self._dlogits.made_rows.uniform
        self._call.kernels.scale_rows(
            self._acc[t],
            None if scale is None else scale[t],
            self._dlogits.labels[t],
            ignore_index=self._call.options.ignore_index,
            plus=None if uniform is None or row is None else (uniform[t], row),
            out=out,
        )
