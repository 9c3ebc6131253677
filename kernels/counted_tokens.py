"""Which tokens count, and what is needed of them: a stable partition in one launch.

T_all = tokens, T = how many are computed.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.kernel import Kernel


@triton.jit
def counts(labels_ptr, token_weight_ptr, offs_t, T_all, ignore_index, BLOCK_T: tl.constexpr):
    """Return which of these tokens count, their labels and their weights."""
    mask = offs_t < T_all
    label = tl.load(labels_ptr + offs_t, mask=mask, other=ignore_index)
    counted = label != ignore_index
    weight = tl.full((BLOCK_T,), 1.0, tl.float32)
    if token_weight_ptr is not None:
        weight = tl.load(token_weight_ptr + offs_t, mask=mask, other=0.0)
        counted = counted & (weight != 0.0)
    return counted, label, weight


@partial(Kernel, debug=True)  # for the assertion
def _counted_tokens_kernel(
    labels_ptr, token_weight_ptr,  # in:  [T_all] int64, [T_all] fp32
    places_ptr, out_labels_ptr, out_weight_ptr,  # out: [T] int64, [T] int64, [T] fp32
    count_ptr,  # out: [] int32
    T_all, T,
    ignore_index,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program places BLOCK_T tokens, and counts those before them for itself.

    Tokens that count come first, in order; the others from the end backwards, so that no program
    needs the number of all that count.
    """
    first = tl.program_id(0) * BLOCK_T
    before = tl.zeros((BLOCK_T,), tl.int32)
    for start in range(0, first, BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        counted, _, _ = counts(labels_ptr, token_weight_ptr, offs_t, T_all, ignore_index, BLOCK_T)
        before += counted.to(tl.int32)
    offs_t = first + tl.arange(0, BLOCK_T)
    counted, label, weight = counts(
        labels_ptr, token_weight_ptr, offs_t, T_all, ignore_index, BLOCK_T
    )
    ordinal = tl.sum(before, axis=0) + tl.cumsum(counted.to(tl.int32), axis=0)
    n = tl.max(ordinal, axis=0)
    tl.device_assert(n <= T, "max_counted must be at least the tokens that count")
    to = tl.where(counted, ordinal - 1, T_all - 1 - offs_t + ordinal)
    mask = (offs_t < T_all) & (to < T)
    tl.store(places_ptr + to, offs_t.to(tl.int64), mask=mask)
    tl.store(out_labels_ptr + to, tl.where(counted, label, ignore_index), mask=mask)
    if first + BLOCK_T >= T_all:
        tl.store(count_ptr, n)
    if out_weight_ptr is not None:
        tl.store(out_weight_ptr + to, tl.where(counted, weight, 0.0), mask=mask)


def counted_tokens(
    labels: Tensor, token_weight: Tensor | None, T: int, *, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return ``(places, labels, token_weight)`` of T tokens, all that count first, in order, and
    how many these are, a scalar int32.

    labels are [T_all] int64, token_weight [T_all] fp32. A token counts if its label is not
    ``ignore_index`` and its weight not 0; the others get ``ignore_index`` and 0. Places [T] int64
    are each once. If more than T count a device-side assertion fails, whose error arrives with the
    next synchronisation.
    """
    T_all = len(labels)
    places, out_labels = labels.new_empty(T), labels.new_empty(T)
    out_weight = None if token_weight is None else token_weight.new_empty(T)
    count = labels.new_empty((), dtype=torch.int32)
    if T_all:
        _counted_tokens_kernel[(-(-T_all // 2048),)](
            labels, token_weight,
            places, out_labels, out_weight,
            count,
            T_all, T,
            ignore_index,
            BLOCK_T=2048, num_warps=8, sanitize_overflow=False,
        )  # fmt: skip
    return places, out_labels, out_weight, count
