"""First derivatives against finite differences in fp64, independent of flce_dist.reference."""

import itertools

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy_with_metrics
from flce_dist.op import plan
from flce_dist.options import Reduction, Schedule
from tests.problems import IGNORE, SCHEDULES, pairwise
from tests.test_api_options import OPTIONS, REDUCTIONS, refused

T, V, H = 5, 7, 3
LABELS = torch.tensor([4, 0, IGNORE, 5, 2])
TOKEN_WEIGHT = torch.tensor([0.5, 2.0, 3.0, 0.0, -1.0], dtype=torch.float64)
BUDGETS: dict[str, int | None] = {"recompute": None, "cached": T * 8 * 6, "in_forward": 1}
OUTPUTS = {"loss": 1, "everything": 4}  # the loss alone, or also lse, logprob and entropy


@pytest.fixture(autouse=True)
def several_windows_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 2 columns, chunks of 2 tokens: each case has several, the last one short."""
    for name in ("_TILE", "_MIN_WINDOW", "_MAX_WINDOW"):
        monkeypatch.setattr(plan, name, 2)


@pytest.mark.parametrize(
    ("options", "schedule", "reduction", "outputs", "far_labels"),
    pairwise(
        case
        for case in itertools.product(OPTIONS, SCHEDULES, REDUCTIONS, OUTPUTS, [False, True])
        if not refused(*case[:4])
    ),
)
def test_derivatives(
    options: str, schedule: Schedule, reduction: Reduction, outputs: str, far_labels: bool
) -> None:
    """gradcheck draws the upstream gradient of each output element, so per token under "none".

    Labels some 100 nats below the largest logit take the maximum as their reference.
    """
    kwargs = {**OPTIONS[options]}
    if kwargs.pop("padded", False):
        kwargs["vocab_size"] = V - 1
    g = torch.Generator().manual_seed(3)
    shapes = ((T, H), (V, H), (V,))
    hidden, weight, bias = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    if far_labels:
        bias[4] = bias[5] = -100.0
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def call(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        out = linear_cross_entropy_with_metrics(
            hidden, weight, LABELS, bias=bias, token_weight=TOKEN_WEIGHT, reduction=reduction,
            schedule=schedule, max_logits_bytes=BUDGETS[schedule], **kwargs,
        )  # fmt: skip
        return out[: OUTPUTS[outputs]]

    assert torch.autograd.gradcheck(call, leaves)
