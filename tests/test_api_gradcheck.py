"""First derivatives against finite differences in fp64, independent of flce_dist.reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.op import plan
from flce_dist.options import Reduction, Schedule
from tests.problems import IGNORE, SCHEDULES, each_schedule, pairwise
from tests.test_api_options import OPTIONS, grid

T, V, H = 5, 7, 3


def options_of(name: str) -> dict[str, Any]:
    options = {**OPTIONS[name]}
    return {"vocab_size": 6, **options} if options.pop("padded", False) else options


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    shapes = ((T, H), (V, H), (V,))
    hidden, weight, bias = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


LABELS = torch.tensor([4, 0, IGNORE, 5, 2])
TOKEN_WEIGHT = torch.tensor([0.5, 2.0, 3.0, 0.0, -1.0], dtype=torch.float64)


@pytest.fixture(autouse=True)
def several_windows_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 2 columns, chunks of 2 tokens: each case has several, the last one short."""
    monkeypatch.setattr(plan, "_TILE", 2)
    monkeypatch.setattr(plan, "_MIN_WINDOW", 2)
    monkeypatch.setattr(plan, "_MAX_WINDOW", 2)


def budget_of(schedule: Schedule) -> int | None:
    """Half the columns of ``cached``, two tokens of ``in_forward``."""
    return {"recompute": None, "cached": T * 8 * 6, "in_forward": 1}[schedule]


@pytest.mark.parametrize(("options", "schedule", "reduction"), pairwise(grid(schedules=SCHEDULES)))
def test_loss(options: str, schedule: Schedule, reduction: Reduction) -> None:
    """gradcheck draws the upstream gradient of each output element, so per token under "none"."""

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, LABELS, bias=bias, token_weight=TOKEN_WEIGHT, reduction=reduction,
            schedule=schedule, max_logits_bytes=budget_of(schedule), **options_of(options),
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, leaves())


@pytest.mark.parametrize("schedule", ["recompute", "cached"])
@pytest.mark.parametrize("options", ["plain", "softcap", "smoothing, z-loss", "everything"])
def test_metrics(options: str, schedule: Schedule) -> None:
    if options == "everything" and schedule == "cached":
        schedule = "auto"  # smoothing under a softcap is not for the cache

    def loss_and_metrics(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        out = linear_cross_entropy_with_metrics(
            hidden, weight, LABELS, bias=bias, token_weight=TOKEN_WEIGHT, reduction="none",
            schedule=schedule, max_logits_bytes=budget_of("cached"), **options_of(options),
        )  # fmt: skip
        return out[:4]

    assert torch.autograd.gradcheck(loss_and_metrics, leaves())


@each_schedule
def test_rescued_tokens(schedule: Schedule) -> None:
    """Labels some 100 nats below the largest logit: the reference is the maximum there."""
    hidden, weight, bias = leaves()
    with torch.no_grad():
        bias[4] = bias[5] = -100.0

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, LABELS, bias=bias, schedule=schedule, z_loss_weight=0.1,
            label_smoothing=0.2, max_logits_bytes=budget_of(schedule),
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))
