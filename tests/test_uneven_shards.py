"""``vocab_range`` with shards of any size: memory within the budget, right gradients."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import linear_cross_entropy
from flce_dist.kernels import eager_logits, gemm
from flce_dist.memory import peak_memory
from flce_dist.op.in_forward import InForward
from flce_dist.op.plan import plan
from flce_dist.testing import relative_rms

T, V_ALL, H = 256, 16384, 8
EVEN = T * V_ALL // 2 * 4  # bytes of an even shard's exponentials, fp32
SLICE = 1 << 19
WORKSPACE = 3 * SLICE + (1 << 19)  # as in test_peak_memory.py


def run(
    group: dist.ProcessGroup | None, *cuts: int, trains: bool = True, **options: Any
) -> tuple[Tensor, Tensor | None, int]:
    """dhidden and dweight of a rank whose rows lie between two cuts; its peak without dweight."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V_ALL, H, generator=g)
    labels = torch.randint(V_ALL, (T,), generator=g)
    rank = 0 if group is None else group.rank()
    if options.get("sequence_parallel"):
        hidden = hidden.chunk(2)[rank].clone()
    hidden.requires_grad_()
    rows = cuts[rank], cuts[rank + 1]
    weight = weight[slice(*rows)].clone().requires_grad_(trains)
    with pytest.MonkeyPatch.context() as patch, peak_memory("cpu") as peak:
        patch.setattr(eager_logits, "SCRATCH_BYTES", SLICE // 2)
        patch.setattr(gemm, "_UPCAST_BYTES", SLICE)
        linear_cross_entropy(
            hidden, weight, labels, vocab_size=V_ALL, vocab_range=rows, tp_group=group, **options
        ).backward()
    assert hidden.grad is not None
    return hidden.grad, weight.grad, peak.bytes - (weight.nbytes if trains else 0)


@pytest.mark.parametrize(
    ("options", "trains"),
    [
        ({"schedule": "cached"}, True),
        ({"schedule": "auto"}, True),
        ({"schedule": "in_forward"}, True),
        # Only hidden is trained, so that a rank which caches all needs no tokens in backward.
        ({"schedule": "cached", "sequence_parallel": True}, False),
    ],
    ids=str,
)
def test_a_larger_shard_stays_within_the_budget(pools, options, trains):
    cut = V_ALL * 3 // 4
    ranks = pools[2].run(run, 0, cut, V_ALL, trains=trains, max_logits_bytes=EVEN, **options)
    dhidden, dweight, _ = run(None, 0, V_ALL, schedule="recompute")
    assert dweight is not None
    if options.get("sequence_parallel"):
        assert relative_rms(torch.cat([x[0] for x in ranks]), dhidden) < 1e-5
    else:
        assert all(relative_rms(x[0], dhidden) < 1e-5 for x in ranks)
    if trains:
        assert relative_rms(torch.cat([x[1] for x in ranks]), dweight) < 1e-5
    assert max(x[2] for x in ranks) <= EVEN + WORKSPACE


@pytest.mark.parametrize("missing", [0, 3, 1000, 100_000])
def test_a_smaller_shard_stays_within_the_budget_with_lent_windows(missing: int) -> None:
    """Its dweight has fewer rows than the plan's; windows that lie there become narrower."""
    T, V, H, limit = 8192, 128256, 4096, 1 << 30
    chosen = plan(
        T=T, V=V, itemsize=2, schedule="in_forward", max_logits_bytes=limit,
        dweight_row_bytes=(2 * H, 4 * H),
    )  # fmt: skip
    assert isinstance(chosen, InForward) and len(chosen.lending) > 2 and len(chosen.chunks()) == 1
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    hidden, weight = torch.empty(T, H, **options), torch.empty(V - missing, H, **options)
    call: Any = SimpleNamespace(V=V - missing, cache_dtype=torch.bfloat16)
    operands: Any = SimpleNamespace(hidden=hidden)
    cache = chosen._chunk_cache(call, operands, torch.empty_like(weight), (0, T))
    new = [x for x in cache.windows if x.untyped_storage().nbytes() != weight.nbytes]
    window = T * 2 * chosen.window_v if cache.width < V - missing else 0
    assert sum(x.untyped_storage().nbytes() for x in new) + window <= limit
    assert 0.9 * (V - missing) <= cache.width <= V - missing
