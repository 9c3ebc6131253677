"""skip_ignored: the GPU's time follows the tokens that count; test_counted.py has the results.

T tokens, V vocabulary rows, H hidden size.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist.kernels import gemm, gpu
from flce_dist.kernels.counted_gemm import counted_gemm
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.testing import RankPool, relative_rms
from tests.counted_problem import MASKS, ONE_RANK, check, masked, n_of, upstream_of
from tests.parallel_problem import joined, misses, rank_step
from tests.problems import (
    Patch,
    device_of,
    interpreted,
    make_inputs,
    on_a_gpu,
    pairwise,
    run_op,
)

TILE = 32  # tokens of a tile of logits in the interpreter


@pytest.mark.parametrize("mask", ["half", "one per block"])
def test_the_loss_has_the_bits_of_an_ordinary_call(mask):
    _, meant = masked(mask)
    for x in (meant.hidden, meant.weight):  # logits of few bits are exact in any BLAS
        x.copy_((64 * x).round() / 64)
    upstream, options = upstream_of("mean"), {"impl": "triton", "schedule": "cached"}
    ordinary, skipping = (
        run_op(meant, upstream, skip_ignored=skips, **options) for skips in (False, True)
    )
    assert torch.equal(ordinary["loss"], skipping["loss"])


@interpreted
def test_tiles_of_other_tokens_are_not_computed(mutate: Patch) -> None:
    """Nor are their rows of D written."""
    seen = []

    def noted(original: Any, d: Tensor, b: Tensor, count: Tensor, **kwargs: Any) -> None:
        seen.append(d.isnan().any(1))
        assert int(count) == n
        original(d, b, count, **kwargs)

    mutate(gpu, "counted_gemm", noted)
    n = int(MASKS["tenth"].sum())
    check("cached", torch.float32, "tenth", "mean", None, True, "triton")
    for rows in seen:
        assert not rows[: -(-n // TILE) * TILE].any() and rows[-(-n // TILE) * TILE :].all()


@pytest.mark.parametrize("impl", ["triton", on_a_gpu])
def test_with_a_count_of_0_only_d_at_the_labels_is_written(impl: str) -> None:
    """So a device decides whether cached columns are computed again."""
    device = device_of(impl)
    inputs = make_inputs(40, 100, 16, ignored=0.0).to(device)
    none = torch.zeros((), dtype=torch.int32, device=device)
    logits = ShardLogits(
        inputs.hidden, inputs.weight, None, inputs.labels, 0, -100, 1.0, None, n_counted=none
    )
    row, d = torch.ones(40, device=device), torch.full((40, 100), 7.0, device=device)
    gpu.dlogits(logits, row, 3 * row, (row, row, row), out=d)
    expected = torch.full_like(d, 7.0).scatter_(1, inputs.labels[:, None], 3.0)
    assert torch.equal(d, expected)


@pytest.mark.parametrize("sp", [False, True])
def test_kernels_on_ranks(ranks: RankPool, sp: bool) -> None:
    """No token of the first rank counts."""
    options: dict[str, Any] = {"impl": "triton", "sequence_parallel": sp, "skip_ignored": True}
    for most in (None, n_of(ONE_RANK) + 2):
        found = ranks.run(rank_step, ONE_RANK, max_counted=most, **options)
        assert misses(joined(found, sequence_parallel=sp), ONE_RANK) == []


OUTPUTS = {"rounded": (torch.bfloat16, False), "new": (torch.float32, False), "added": (None, True)}
GEMMS = pairwise(
    itertools.product(OUTPUTS, [False, True], [0, 1, 37, 64, 70], [None, 4], [torch.bfloat16, None])
)


@pytest.mark.parametrize(("output", "sums", "count", "pad", "dtype"), GEMMS)
def test_the_gemms_see_nothing_beyond_the_count(output, sums, count, pad, dtype):
    """Where NaN lies; but the last step over tokens is 0 up to its end. ``pad`` forbids TMA.

    With 1 and 70 tokens a last wave of tiles is not full.
    """
    (T, V, H), g, device = (70, 300, 80), torch.Generator().manual_seed(0), device_of("triton")
    dtype = dtype or torch.float32
    d, weight, hidden, row = (
        torch.randn(*shape, generator=g).to(dtype) for shape in ((T, V), (V, H), (T, H), (H,))
    )
    d[count:] = hidden[count:] = 0.0
    row *= count > 0
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
