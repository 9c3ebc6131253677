"""The plain GEMMs around the fused kernels, by cuBLAS on a GPU and by torch on a CPU.

All accumulate in fp32 (fp64 for fp64 operands) and round once. But where a result has 16 bits and
few tiles, cuBLAS may cut the sum into parts and round each, unless PyTorch's
``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`` (or fp16) is off. Of fp32
operands cuBLAS takes TF32 where ``torch.set_float32_matmul_precision`` allows it; our own kernels
never do.
A CPU has no GEMM of 16-bit operands with an fp32 result, so there slices are upcast.

T = tokens, W = columns of a window, H = hidden.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_UPCAST_BYTES = 16 << 20  # of one fp32 slice on the CPU
_HALF = (torch.bfloat16, torch.float16)


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def operand(x: Tensor) -> Tensor:
    """Return x as ``project`` takes it: upcast once on a CPU, unchanged on a GPU."""
    return x if x.is_cuda else x.to(acc_dtype(x.dtype))


def project(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return ``hidden @ weight.T`` [T, W] in the accumulation dtype, with hidden of ``operand``."""
    if _has_fp32_output(weight):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    # Selective checkpoints keep what mm returns, but not what it writes, and the caller changes it.
    out = hidden.new_empty(len(hidden), len(weight))
    return torch.mm(hidden, weight.to(hidden.dtype).T, out=out)


def add_matmul(acc: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Write ``acc = a @ b`` if ``first``, else add ``acc += a @ b``, rounded once.

    a is [M, K], b [K, N], acc [M, N] in the accumulation dtype or the operands' own.
    """
    beta = 0 if first else 1
    if not a.shape[1]:
        if first:
            acc.zero_()
    elif not _upcasts(a):
        if acc.dtype == a.dtype:
            torch.addmm(acc, a, b, beta=beta, out=acc)
        else:
            torch.addmm(acc, a, b, beta=beta, out_dtype=acc.dtype, out=acc)
    elif acc.dtype == a.dtype:
        for m in slices(a.shape[0], 4 * b.shape[1]):
            part = acc[m].to(acc_dtype(a.dtype))
            add_matmul(part, a[m], b, first=first)
            acc[m] = part
    else:
        for k in slices(a.shape[1], 4 * max(acc.shape)):
            torch.addmm(acc, a[:, k].to(acc.dtype), b[k].to(acc.dtype), beta=beta, out=acc)
            beta = 1


def product(
    d: Tensor, b: Tensor, count: Tensor | None = None, *,
    sums_tokens: bool, row: Tensor | None = None, out: Tensor, adds: bool,
) -> None:  # fmt: skip
    """``counted_gemm`` over all rows; in those that do not count, if any, d is 0.

    ``count`` is not read. Unlike there, a 16-bit ``out`` takes two roundings with ``row``: of the
    row, or of the sum without it.
    """
    a = d.T if sums_tokens else d
    if out.dtype != d.dtype or adds:
        add_matmul(out, a, b, first=not adds)
        if row is not None:
            out += row
    elif _upcasts(a):
        for m in slices(a.shape[0], 4 * b.shape[1]):
            acc = out.new_empty(out[m].shape, dtype=acc_dtype(a.dtype))
            add_matmul(acc, a[m], b, first=True)
            out[m] = acc if row is None else acc + row
    elif row is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(row.to(out.dtype), a, b, out=out)


def weighted_row_sum(
    weights: Tensor, x: Tensor, counted: Callable[..., None] | None = None
) -> Tensor:
    """Return ``sum_t weights[t] * x[t]`` as [N] in weights' dtype; weights [T] fp32, x [T, N].

    On a GPU by one GEMM of each weight's high and low part in x's dtype, about 16 bits of it.
    ``counted`` is ``counted_gemm`` over the tokens that count, or None if all do.
    """
    if not x.numel():  # no token, or an empty shard
        return weights.new_zeros(x.shape[1])
    if counted is None and not _has_fp32_output(x):
        total = weights.new_zeros(x.shape[1])
        for n in slices(x.shape[1], 4 * x.shape[0]):
            total[n] = weights @ x[:, n].to(weights.dtype)
        return total
    # Normalised, since fp16 would flush weights below 6e-8 (1 / T is near that at large T).
    unit = weights.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    normal = weights / unit
    high = normal.to(x.dtype)
    low = (normal - high).to(x.dtype)
    if counted is not None:
        padding = torch.zeros_like(high).expand(6, -1)  # to rows that TMA can address
        sums = weights.new_empty(x.shape[1], 8)
        counted(x, torch.stack((high, low, *padding), 1), sums_tokens=True, out=sums, adds=False)
        return sums.sum(1) * unit
    return torch.mm(torch.stack((high, low)), x, out_dtype=torch.float32).sum(0) * unit


def _upcasts(x: Tensor) -> bool:
    return not x.is_cuda and x.dtype in _HALF


def _has_fp32_output(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _HALF


def slices(length: int, bytes_each: int) -> Iterator[slice]:
    """Cut ``length`` items of ``bytes_each`` bytes into slices of at most ``_UPCAST_BYTES``."""
    step = max(1, _UPCAST_BYTES // max(1, bytes_each))
    return (slice(start, start + step) for start in range(0, length, step))
