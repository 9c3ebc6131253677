"""skip_ignored: the GPU's time follows the tokens that count; nothing else changes.

T tokens, V vocabulary rows, H hidden size.
"""

import itertools

import pytest
import torch

from flce_dist.kernels import gemm
from flce_dist.kernels.counted_gemm import counted_gemm
from flce_dist.testing import relative_rms
from tests.problems import device_of, pairwise

OUTPUTS = {"rounded": (torch.bfloat16, False), "new": (torch.float32, False), "added": (None, True)}
GEMMS = pairwise(
    itertools.product(OUTPUTS, [False, True], [0, 1, 37, 64, 70], [None, 4], [torch.bfloat16, None])
)


@pytest.mark.parametrize(("output", "sums", "count", "pad", "dtype"), GEMMS)
def test_the_gemms_see_nothing_beyond_the_count(output, sums, count, pad, dtype):
    """Where NaN lies; but the last step over tokens is 0 up to its end. ``pad`` forbids TMA."""
    (T, V, H), g, device = (70, 90, 80), torch.Generator().manual_seed(0), device_of("triton")
    dtype = dtype or torch.float32
    d, weight, hidden, row = (
        torch.randn(*shape, generator=g).to(dtype) for shape in ((T, V), (V, H), (T, H), (H,))
    )
    d[count:] = hidden[count:] = 0.0
    out_dtype, adds = OUTPUTS[output]
    out = torch.randn(V if sums else T, H, generator=g).to(out_dtype or dtype)
    expected, b, of_sum = out.double(), hidden if sums else weight, row.float() if sums else None
    gemm.product(
        d.double(), b.double(), None, sums_tokens=sums,
        row=None if of_sum is None else of_sum.double(), out=expected, adds=adds,
    )  # fmt: skip
    end = -(-count // 32) * 32
    d[end if sums else count :] = torch.nan
    hidden[end:] = torch.nan
    if pad is not None:
        d, b, out = (torch.nn.functional.pad(x, (0, pad))[:, : x.shape[1]] for x in (d, b, out))
    tokens = torch.tensor(count, dtype=torch.int32)
    d, b, out, tokens = (x.to(device) for x in (d, b, out, tokens))
    of_sum = None if of_sum is None else of_sum.to(device)
    counted_gemm(d, b, tokens, sums_tokens=sums, row=of_sum, out=out, adds=adds)
    rows = V if sums else count
    error = relative_rms(out.cpu()[:rows], expected[:rows])
    assert error < (1e-6 if out.dtype == torch.float32 else 3e-3)
