"""``vocab_range`` with shards of any size: memory within the budget, right gradients."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flce_dist.kernels import gemm
from flce_dist.kernels.logits import eager as eager_logits
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.schedules.choose import choose_schedule
from flce_dist.schedules.in_forward import InForward
from tests import parallel_problem
from tests.outcomes import Outcome
from tests.parallel_problem import Problem, joined, misses, rank_step

ONE = Problem(T=256, H=8, V_all=16384)
CUT = ONE.V_all * 3 // 4
EVEN = ONE.T * ONE.V_all // 2 * 4  # bytes of an even shard's exponentials, fp32
SLICE = 1 << 19
WORKSPACE = 3 * SLICE + (1 << 19)  # as in test_peak_memory.py


def uneven_step(group: Any, **options: Any) -> tuple[Outcome, int]:
    """Of rank 0 with three quarters of the rows, or rank 1; the peak beyond weight and dweight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            parallel_problem, "vocab_range", lambda n, rank, P: [(0, CUT), (CUT, n)][rank]
        )
        patch.setattr(eager_logits, "SCRATCH_BYTES", SLICE // 2)
        patch.setattr(gemm, "_UPCAST_BYTES", SLICE)
        assert len(ONE.tensors) == 4  # drawn before the measurement
        with peak_memory("cpu") as peak:
            found = rank_step(group, ONE, max_logits_bytes=EVEN, **options)
    return found, peak.bytes - 2 * found.dweight.nbytes


@pytest.mark.parametrize(("schedule", "sp", "frozen"), [
    ("cached", False, ()),
    ("auto", False, ()),
    ("in_forward", False, ()),
    # Only hidden is trained, so that a rank which caches all needs no tokens in backward.
    ("cached", True, ("weight", "bias")),
])  # fmt: skip
def test_a_larger_shard_stays_within_the_budget(pools, schedule, sp, frozen):
    options = {"schedule": schedule, "sequence_parallel": sp, "frozen": frozen}
    outcomes, peaks = zip(*pools[2].run(uneven_step, **options), strict=True)
    wrong = [x.split(":")[0] for x in misses(joined(outcomes, sequence_parallel=sp), ONE)]
    assert wrong == [f"d{name}" for name in frozen]
    assert max(peaks) <= EVEN + WORKSPACE


@pytest.mark.parametrize("missing", [0, 3, 1000, 100_000])
def test_a_smaller_shard_stays_within_the_budget_with_lent_windows(missing: int) -> None:
    """Its dweight has fewer rows than the plan's; windows that lie there become narrower."""
    T, V, H, limit = 8192, 128256, 4096, 1 << 30
    chosen = choose_schedule(
        T=T, V=V, itemsize=2, schedule="in_forward", max_logits_bytes=limit,
        dweight_row_bytes=(2 * H, 4 * H),
    )  # fmt: skip
    assert isinstance(chosen, InForward) and len(chosen.lending) > 2 and len(chosen.chunks()) == 1
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    weight = torch.empty(V - missing, H, **options)
    call: Any = SimpleNamespace(V=V - missing, cache_dtype=torch.bfloat16)
    cache = chosen._chunk_cache(call, T, weight.device, torch.empty_like(weight))
    new = [x for x in cache.windows if x.untyped_storage().nbytes() != weight.nbytes]
    window = T * 2 * chosen.window_v if cache.width < V - missing else 0
    assert sum(x.untyped_storage().nbytes() for x in new) + window <= limit
    assert 0.9 * (V - missing) <= cache.width <= V - missing
