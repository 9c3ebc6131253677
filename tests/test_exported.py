"""torch.export takes the loss, for any number of tokens, and refuses the rest by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flce_dist import linear_cross_entropy
from flce_dist.reference import reference_linear_cross_entropy
from flce_dist.testing import relative_rms
from tests.function_calls import CALLS
from tests.test_compiled import HIDDEN, LABELS, WEIGHT, inputs


class Exported(nn.Module):
    """``call(hidden, weight, labels)`` of a weight of its own."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(WEIGHT.detach().clone())
        self.call = call

    def forward(self, hidden: Tensor, labels: Tensor) -> Any:
        return self.call(hidden, self.weight, labels)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_loss_is_for_any_number_of_tokens(strict):
    module, tokens = Exported(linear_cross_entropy), {1: torch.export.Dim("tokens")}
    with torch.no_grad():
        exported = torch.export.export(
            module, (HIDDEN, LABELS), strict=strict, dynamic_shapes=(tokens, tokens)
        ).module()
        hidden, _, _, labels = inputs(5)
        assert torch.equal(exported(hidden, labels), module(hidden, labels))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("schedule", "frozen"), [
    ("auto", False), ("auto", True), ("in_forward", False), ("cached", False), ("recompute", False),
])  # fmt: skip
def test_an_exported_loss_with_gradients_is_for_any_number_of_tokens(schedule, frozen, strict):
    """The budget bounds none, but one that is named what ``cached`` keeps."""
    for budget in (None, 4096) if schedule != "cached" else (None,):
        call = partial(linear_cross_entropy, schedule=schedule, max_logits_bytes=budget)
        module, tokens = Exported(call), {1: torch.export.Dim("tokens")}
        module.weight.requires_grad_(not frozen)
        exported: Any = torch.export.export(
            module, (HIDDEN, LABELS), strict=strict, dynamic_shapes=(tokens, tokens)
        ).module()
        hidden, _, _, labels = inputs(50)
        truth = reference_linear_cross_entropy(hidden.double(), module.weight.double(), labels)[0]
        loss = exported(hidden, labels)
        assert relative_rms(loss.detach(), truth.detach()) <= 1e-6
        for ours, of_loss in ((hidden, hidden), (exported.weight, module.weight))[: 2 - frozen]:
            (expected,) = torch.autograd.grad(truth, of_loss, retain_graph=True)
            (gradient,) = torch.autograd.grad(loss, ours, retain_graph=True)
            assert relative_rms(gradient, expected) <= 1e-5


OUTSIDE = ("linear_logprob", "linear_divergence", "linear_top_k", "linear_sample")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_not_exported_says_so(name, strict):
    hidden, ids = HIDDEN.detach(), LABELS.clamp(min=0)
    message = rf"{name} is not part of a graph of torch\.export; export what returns the hidden"
    with torch.no_grad(), pytest.raises(Exception, match=message):
        torch.export.export(Exported(CALLS[name]), (hidden, ids), strict=strict)
