"""Write the gradient at named ids into D.  T = tokens, N = named ids of all, W = columns of D."""

import triton.language as tl
from torch import Tensor

from flce_dist.kernels.kernel import Kernel
from flce_dist.kernels.primitives import cast
from flce_dist.kernels.scores.token_ids import TokenIds

_BLOCK_N = 256


@Kernel
def _write_named_kernel(
    ids_ptr, token_ptr, first_ptr, value_ptr,  # in:  [N] int64, int64, bool, fp32
    out_ptr,  # out: [T, W], only the named elements
    N, W,
    stride_t,
    vocab_start_index,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program writes BLOCK_N entries; the first of equal ones adds up those after it."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    id = tl.load(ids_ptr + n, mask=n < N, other=-1)
    token = tl.load(token_ptr + n, mask=n < N, other=0)
    column = id - vocab_start_index
    is_first = tl.load(first_ptr + n, mask=n < N, other=0) != 0
    is_here = is_first & (column >= 0) & (column < W)
    value = tl.load(value_ptr + n, mask=is_here, other=0.0)
    more = is_here
    next = n + 1
    while tl.max(more.to(tl.int32), axis=0) > 0:
        more = more & (next < N)
        more = more & (tl.load(first_ptr + next, mask=more, other=1) == 0)
        more = more & (tl.load(ids_ptr + next, mask=more, other=-1) == id)
        value += tl.load(value_ptr + next, mask=more, other=0.0)
        next += 1
    value = cast(value, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * stride_t + column, value, mask=is_here)


def write_named(out: Tensor, ids: TokenIds, value: Tensor, *, vocab_start_index: int) -> None:
    """Write ``out[t, id - vocab_start_index]`` for each token's ids that have a column there.

    out is [T, W]. The element is the sum of the entries that have the id; value is [N] fp32.
    """
    N = len(value)
    if N and out.shape[1]:
        _write_named_kernel[(-(-N // _BLOCK_N),)](
            ids.ids, ids.token, ids.first, value,
            out,
            N, out.shape[1],
            out.stride(0),
            vocab_start_index,
            BLOCK_N=_BLOCK_N,
        )  # fmt: skip
