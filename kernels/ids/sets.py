"""Scores of a token's set of ids, which has each id once, and their gradient.

T = tokens, N = ids of all.

With r the largest logit of the set, and S the sum of ``exp(z_n - r)`` over the set without that top
entry, ``logprob_n = z_n - r - log1p(S)``: no cancellation where one id has nearly all.

Over the vocabulary S contains U, the sum over the ids that are not named, and ``other`` is the log
of ``U / (1 + S)``. r is the reference of U, as ``rescue.py`` leaves it, if that is larger. If all
ids are banned r is 0 and the top entry's exponential is 0, not 1: then lse is -inf, all else NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.ids.token_ids import TokenIds
from flce_dist.kernels.logits.named_columns import first_entry
from flce_dist.kernels.primitives import FAR, exp, finite, log1p, softcap_slope, times_exponent
from flce_dist.kernels.rows.formulas import TokenStats

_BLOCK_N = 128  # entries of one step


@triton.jit
def _entries(ids_ptr, n, begin, end):
    """Ids of a token, -1 at padding and from ``end`` on, and whether they are in its set."""
    id = tl.load(ids_ptr + n, mask=n < end, other=-1)
    before = tl.load(ids_ptr + n - 1, mask=(n > begin) & (n < end), other=-1)
    return id, (id >= 0) & (id != before)


@triton.jit
def _logits(z_ptr, ids_ptr, n, begin, end, id):
    """Logits of entries n, which have this id: of a repeated one, that of its first entry."""
    first = first_entry(ids_ptr, begin + n * 0, end - begin, end, id)
    return tl.load(z_ptr + first, mask=n < end, other=0.0)


@triton.jit
def _statistics(z_ptr, ids_ptr, begin, end, BLOCK_N: tl.constexpr):
    """Return r, S of the set alone, and S with each term times ``z_n - r``; NaN makes all NaN."""
    reference = -float("inf")
    top = end
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        _, in_set = _entries(ids_ptr, n, begin, end)
        z = tl.load(z_ptr + n, mask=in_set, other=-float("inf"))
        largest = tl.max(z, axis=0)
        place = tl.min(tl.where(in_set & (z == largest), n, end), axis=0)
        top = tl.where((largest > reference) | (top == end), place, top)
        reference = tl.maximum(reference, largest)
    others = 0.0
    weighted = 0.0
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        _, in_set = _entries(ids_ptr, n, begin, end)
        x = tl.load(z_ptr + n, mask=in_set, other=0.0) - finite(reference)
        is_other = in_set & (n != top)
        e = tl.where(is_other, exp(x), 0.0)
        others += tl.sum(e, axis=0)
        weighted += tl.sum(tl.where(is_other, times_exponent(e, x), 0.0), axis=0)
    return reference, others, weighted


@triton.jit
def _with_unnamed(reference_ptr, others_ptr, weighted_ptr, t, top_logit, others, weighted):
    """Return r, S, the top entry's exponential, the sum of ``exp(x) x``, U and log U.

    ``others`` and ``weighted`` are S and that sum over the set alone, relative to ``top_logit``.
    """
    if others_ptr is None:
        reference = finite(top_logit)
        return reference, others, exp(top_logit - reference), weighted, 0.0, 0.0
    else:
        sum_unnamed = tl.load(others_ptr + t)
        # Without any U, top_logit may lie far below its reference.
        reference_unnamed = tl.where(sum_unnamed == 0.0, top_logit, tl.load(reference_ptr + t))
        reference = finite(tl.maximum(reference_unnamed, top_logit))
        above = top_logit - reference
        change = reference_unnamed - reference
        e_top = exp(above)
        factor = exp(change)
        unnamed = sum_unnamed * factor  # U may underflow
        log_unnamed = tl.log(sum_unnamed) + change
        if weighted_ptr is not None:  # x of a named id is that of the set, and above
            weighted = tl.where(e_top == 0.0, 0.0, e_top * (weighted + (1 + others) * above))
            weighted += factor * tl.load(weighted_ptr + t) + unnamed * change
        return reference, others * e_top + unnamed, e_top, weighted, unnamed, log_unnamed


@triton.jit(debug=True)  # for the assertion
def _set_scores_kernel(
    z_ptr, ids_ptr, offsets_ptr, place_ptr,  # in:  [N] fp32, as in TokenIds
    reference_ptr, others_ptr, weighted_ptr,  # in:  [T] fp32 of TokenStats, or None
    logprob_ptr, lse_ptr, entropy_ptr, other_ptr,  # out: [N], [T], [T], [T] fp32
    vocab_size,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program scores one token."""
    t = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + t)
    end = tl.load(offsets_ptr + t + 1)
    top_logit, named_others, weighted = _statistics(z_ptr, ids_ptr, begin, end, BLOCK_N)
    reference, others, e_top, weighted, unnamed, log_unnamed = _with_unnamed(
        reference_ptr, others_ptr, weighted_ptr, t, top_logit, named_others, weighted
    )
    below = log1p(others + (e_top - 1))
    # Padding comes first.
    is_counted = tl.load(ids_ptr + end - 1, mask=begin < end, other=-1) >= 0
    tl.store(lse_ptr + t, tl.where(is_counted, reference + below, 0.0))
    if entropy_ptr is not None:
        entropy = below - weighted / (e_top + others)
        tl.store(entropy_ptr + t, tl.where(is_counted, entropy, 0.0))
    if other_ptr is not None:
        named = e_top * (1 + named_others)
        other = tl.where(unnamed > named, -log1p(named / unnamed), log_unnamed - below)
        tl.store(other_ptr + t, tl.where(is_counted, other, 0.0))
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        id = tl.load(ids_ptr + n, mask=n < end, other=-1)
        tl.device_assert(
            (id >= -1) & (id < vocab_size), "ids must be within [0, vocab_size), or -1"
        )
        z = _logits(z_ptr, ids_ptr, n, begin, end, id)
        place = tl.load(place_ptr + n, mask=n < end, other=0)
        logprob = tl.where(id >= 0, z - reference - below, 0.0)
        tl.store(logprob_ptr + place, logprob, mask=n < end)


def set_scores(
    z: Tensor, ids: TokenIds, unnamed: TokenStats | None, *, vocab_size: int, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return ``(logprob, lse, other, entropy)``: [N] in the caller's order, and [T] or None each.

    z is [N] fp32, of all ranks; of a repeated id only its first entry is read. Results are 0 at
    padding, and for tokens without ids. Over the vocabulary with ``unnamed``, statistics of the
    ids that are not named, else over the ids. Asserts that ids are below vocab_size (of all).
    """
    T = len(ids.offsets) - 1
    logprob = torch.empty_like(z)
    lse = z.new_empty(T)
    entropy = z.new_empty(T) if with_entropy else None
    other = None if unnamed is None else z.new_empty(T)
    of_unnamed: tuple[Tensor | None, ...] = (None, None, None)
    if unnamed is not None:
        of_unnamed = (unnamed.reference, unnamed.others, unnamed.sum_ez)
    if T:
        _set_scores_kernel[(T,)](
            z, ids.ids, ids.offsets, ids.place,
            *of_unnamed,
            logprob, lse, entropy, other,
            vocab_size,
            BLOCK_N=_BLOCK_N, num_warps=1,
        )  # fmt: skip
    return logprob, lse, other, entropy


@triton.jit
def _of_token(x_ptr, t):
    """A token's number, 0 without any."""
    if x_ptr is None:
        return 0.0
    else:
        return tl.load(x_ptr + t)


@triton.jit
def _expm1_near_0(x):
    """``exp(x) - 1`` for -0.7 <= x <= 0: the next term of the series is below 1e-9 of it."""
    series = 1.0
    for k in tl.static_range(10, 1, -1):
        series = 1 + x * series / k
    return x * series


@triton.jit
def _set_gradient_kernel(
    z_ptr, ids_ptr, offsets_ptr, place_ptr,  # in:  [N] fp32, as in TokenIds
    logprob_ptr, entropy_ptr, inverse_ptr,  # in:  [N], [T], [T] fp32
    dlogprob_ptr, dlse_ptr, dentropy_ptr,  # in:  likewise, or None
    dz_ptr, sums_ptr,  # out: [N], [T] fp32
    logit_scale, softcap,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program takes one token."""
    t = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + t)
    end = tl.load(offsets_ptr + t + 1)
    g = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if dlogprob_ptr is not None:
        for start in range(begin, end, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            is_id = tl.load(ids_ptr + n, mask=n < end, other=-1) >= 0
            place = tl.load(place_ptr + n, mask=is_id, other=0)
            g += tl.load(dlogprob_ptr + place, mask=is_id, other=0.0)
    total = tl.sum(g, axis=0)
    tl.store(sums_ptr + t, total)
    dlse = _of_token(dlse_ptr, t)
    entropy = _of_token(entropy_ptr, t)
    dentropy = _of_token(dentropy_ptr, t)
    tempered_scale = logit_scale
    if inverse_ptr is not None:
        tempered_scale *= tl.load(inverse_ptr + t)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        id, in_set = _entries(ids_ptr, n, begin, end)
        place = tl.load(place_ptr + n, mask=in_set, other=0)
        logprob = tl.load(logprob_ptr + place, mask=in_set, other=0.0)
        p = exp(logprob)
        dz = p * dlse
        if dentropy_ptr is not None:
            dz -= p * (tl.maximum(logprob, FAR) + entropy) * dentropy
        if dlogprob_ptr is not None:
            g = tl.load(dlogprob_ptr + place, mask=in_set, other=0.0)
            repeats = in_set
            next = n + 1
            while tl.max(repeats.to(tl.int32), axis=0) > 0:
                repeats &= next < end
                repeats &= tl.load(ids_ptr + next, mask=repeats, other=-1) == id
                place = tl.load(place_ptr + next, mask=repeats, other=0)
                g += tl.load(dlogprob_ptr + place, mask=repeats, other=0.0)
                next += 1
            dz += tl.where(p <= 0.5, g - p * total, g - total - _expm1_near_0(logprob) * total)
        dz *= tempered_scale
        if softcap is not None:
            z = _logits(z_ptr, ids_ptr, n, begin, end, id)
            dz *= softcap_slope(
                z, softcap, 1.0 if inverse_ptr is None else tempered_scale / logit_scale
            )
        tl.store(dz_ptr + n, tl.where(in_set, dz, 0.0), mask=n < end)


def set_gradient(
    z: Tensor, ids: TokenIds, logprob: Tensor, entropy: Tensor | None,
    upstream: tuple[Tensor | None, Tensor | None, Tensor | None],
    inverse_temperature: Tensor | None, *, softcap: float | None, logit_scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return [N]: the gradient of each id's product ``h . w``, with its first entry; and G [T].

    upstream are gradients of logprob in the caller's order, lse [T] and entropy [T]. With g_n
    those of logprob, G their sum over the token and H the entropy::

        dz_n = g_n + p_n (dlse - G - dH (logprob_n + H))

    g_n is the sum of those of all entries of the id; those that repeat it, and padding, are 0.
    Where p_n is near 1, 1 - p_n keeps its relative precision.
    """
    T = len(ids.offsets) - 1
    dz = torch.empty_like(z)
    sums = z.new_empty(T)
    if T:
        _set_gradient_kernel[(T,)](
            z, ids.ids, ids.offsets, ids.place,
            logprob, entropy, inverse_temperature,
            *(None if g is None else g.contiguous() for g in upstream),
            dz, sums,
            logit_scale, softcap,
            BLOCK_N=_BLOCK_N, num_warps=1,
        )  # fmt: skip
    return dz, sums
