"""A pass over the stored logits of a pair: D, the gradient by the student's logits.

Memory is what it takes: 8 bytes of logits for each element, and 2 to 4 of D. ``formulas.py`` has
the mathematics. T = tokens, V = vocabulary rows here.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.divergence.formulas import Measure, PairStats
from flce_dist.kernels.divergence.pair_terms import log_ratios, weighted
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.primitives import cast, computed, exp, softcap_slope
from flce_dist.kernels.tuning import LARGEST_TILE_T, next_power_of_2

_BLOCK = 4096  # columns of a token at a time


@triton.jit(do_not_specialize=["T"])
def _pair_dlogits_kernel(
    s_ptr, t_ptr, labels_ptr,  # in:  [T, V] fp32 each, [T] int64
    top_ptr, log_total_ptr, teacher_top_ptr, teacher_log_total_ptr, shift_ptr,  # in:  [T] fp32 each
    centre_ptr, scale_ptr,  # in:  [T] fp32 each
    out_ptr,  # out: [T, V]
    T, V,
    stride_s_t, stride_t_t, stride_out_t,
    scalars, beta,  # those of ShardLogits
    KIND: tl.constexpr, TILE_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program writes BLOCK columns of one token."""
    t = tl.program_id(0).to(tl.int64)  # T * V passes 2**31 at 16k x 128k
    softcap = scalars.softcap
    inverse_ptr = scalars.inverse_temperature
    offs_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Beyond a whole tile of logits after the last token that counts nobody reads.
    mask = offs_v < tl.where(t < computed(scalars.n_counted, T) + TILE_T, V, 0)
    counted = tl.load(labels_ptr + t) != scalars.ignore_index
    mask_in = mask & counted
    s = tl.load(s_ptr + t * stride_s_t + offs_v, mask=mask_in, other=-float("inf"))
    y = tl.load(t_ptr + t * stride_t_t + offs_v, mask=mask_in, other=-float("inf"))
    x = s - tl.load(top_ptr + t)
    y = y - tl.load(teacher_top_ptr + t)
    p = exp(x - tl.load(log_total_ptr + t))
    if KIND == "forward_kl":
        dz = p - exp(y - tl.load(teacher_log_total_ptr + t))
    else:
        d = (x - y) - tl.load(shift_ptr + t)
        centre = tl.load(centre_ptr + t)
        if KIND == "reverse_kl":
            dz = weighted(p, d - centre)
        elif KIND == "jsd":
            _, of_student = log_ratios(d, beta)
            dz = (1 - beta) * weighted(p, of_student - centre)
        else:
            dz = p * (tl.where(d > 0, 1.0, 0.0) - centre)
    dz *= tl.load(scale_ptr + t)
    if softcap is not None:
        inverse = 1.0
        if inverse_ptr is not None:
            inverse = tl.load(inverse_ptr + t)
        dz *= softcap_slope(s, softcap, inverse)
    dz = tl.where(counted, dz, 0.0)
    tl.store(out_ptr + t * stride_out_t + offs_v, cast(dz, out_ptr.dtype.element_ty), mask=mask)


def pair_dlogits(
    s: Tensor, t: Tensor, logits: ShardLogits, stats: PairStats, measure: Measure, scale: Tensor, *,
    out: Tensor,
) -> None:  # fmt: skip
    """Write D to ``out`` [T, V], in hidden's dtype: ``scale`` [T] times softcap' times the gradient
    of each token's value by the student's tempered logits; 0 where ignored.
    """
    T, V = s.shape
    if T == 0 or V == 0:
        return
    block = min(_BLOCK, next_power_of_2(V))
    _pair_dlogits_kernel[(T, -(-V // block))](
        s, t, logits.labels,
        *stats[:5],
        stats.centre, scale,
        out,
        T, V,
        s.stride(0), t.stride(0), out.stride(0),
        logits.scalars, measure.beta,
        KIND=measure.kind, TILE_T=LARGEST_TILE_T, BLOCK=block, num_warps=8,
    )  # fmt: skip
