"""Gradients wherever D comes from; gathered hidden may be overwritten, never a caller's."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from flce_dist.arguments.options import ScheduleName
from flce_dist.kernels.interface import kernels_of
from flce_dist.schedules.choose import choose_schedule
from tests.parallel_problem import chunks_of, plan_sizes
from tests.problems import both
from tests.random_cases import Drawn, check_on_ranks

T, H, P = 64, 16, 2
BF16, FP16 = torch.bfloat16, torch.float16
BUDGET = T * 4 * 160  # of 254 columns; windows are of 32
OPTIONS = ("label_smoothing", 0.1), ("z_loss_weight", 1e-2), ("logit_scale", 0.5)

CASES: dict[str, tuple[ScheduleName, int | None, torch.dtype]] = {
    "recompute": ("recompute", None, torch.float32),
    "recompute fp16": ("recompute", None, FP16),
    "cached bf16": ("cached", None, BF16),
    "mixed": ("cached", BUDGET, torch.float32),
    "mixed fp16": ("cached", BUDGET // 2, FP16),
    "in_forward lent, chunks": ("in_forward", BUDGET // 4, BF16),
    "in_forward lent, mixed": ("in_forward", BUDGET, torch.float32),
}
"""Schedule, max_logits_bytes and dtype."""


@pytest.fixture(autouse=True)
def small_windows() -> Iterator[None]:
    with plan_sizes(tile=16, min_window=32, max_window=32, most_recomputed=0.4, first_lent=16):
        yield


@pytest.mark.parametrize("case", CASES)
def test_cases_are_what_they_are_called(case: str) -> None:
    schedule, budget, dtype = CASES[case]
    chosen = choose_schedule(
        T=T, V=254, itemsize=dtype.itemsize, schedule=schedule, max_logits_bytes=budget,
        converts=dtype == FP16, dweight_row_bytes=(H * dtype.itemsize, 4 * H),
    )  # fmt: skip
    assert (chosen.cached_v == 0) == ("recompute" in case)
    assert (0 < chosen.cached_v < 254) == ("mixed" in case)
    assert (len(chunks_of(chosen)) > 1) == ("chunks" in case)
    assert bool(getattr(chosen, "lending", ())) == ("lent" in case)


@pytest.mark.usefixtures("one_launch_at_a_time")
@pytest.mark.parametrize(
    ("impl", "case", "sequence_parallel"),
    [*itertools.product(["eager"], CASES, [False, True])]
    + [("triton", case, True) for case in CASES if "fp16" not in case],
)
def test_gradients(impl: str, case: str, sequence_parallel: bool) -> None:
    schedule, budget, dtype = CASES[case]
    drawn = Drawn(
        P=P, tokens=T // P, batch=1, H=H, V_all=254 * P - 1, dtype=dtype, reduction="sum",
        sequence_parallel=sequence_parallel, options=OPTIONS,
        how=(("schedule", schedule), ("max_logits_bytes", budget)),
    )  # fmt: skip
    check_on_ranks(drawn, impl)


@both
def test_rows_in_place(impl: str) -> None:
    """Only the given rows and columns of a larger matrix are written."""
    kernels, labels = kernels_of(impl), torch.tensor([3, -100, 0, -100, 7])
    whole = torch.randn(7, 10)
    whole[2, 4], whole[4, 3] = torch.nan, torch.inf
    expected = whole.clone()
    expected[[2, 4], 2:9] = 0.0
    part = whole[1:6, 2:9]
    kernels.scale_rows(part, None, labels, ignore_index=-100, out=part)
    assert torch.equal(whole, expected)

    x, scale = whole[1:6, 2:9], torch.tensor([2.0, torch.nan, -1.0, 0.0, 0.5])
    expected[1:6, 2:9] *= scale.where(labels != -100, 0.0)[:, None]
    kernels.scale_rows(x, scale, labels, ignore_index=-100, out=x)
    assert torch.equal(whole, expected)
