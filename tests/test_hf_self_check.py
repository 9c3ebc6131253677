"""``check_loss``: equal losses of a right plug-in, others of a wrong one, nothing left."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from flce_dist.hf import check_loss
from flce_dist.hf.steps import Formula
from tests.hf_models import KINDS, batch, ours, real_logits, theirs


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_equal(kind):
    model = theirs(kind)
    with real_logits() as made:
        found = check_loss(ours(model), **batch())
    assert len(made) == 1  # of the model's own loss
    assert float(found.difference) < 1e-5
    torch.testing.assert_close(found.own, model.eval()(**batch()).loss.detach())


def test_a_mistake_shows():
    with mock.patch.object(Formula, "times", lambda self, factor: self):
        assert float(check_loss(ours(theirs("granite, quotient")), **batch()).difference) > 0.01


@pytest.mark.parametrize("wrap", [lambda x: x, torch.compile], ids=["bare", "compiled"])
def test_options_modes_and_wrappers(wrap):
    plugged = ours(theirs(), label_smoothing=0.1, z_loss_weight=0.1)
    plugged.model.layers[0].eval()
    before = plugged(**batch()).loss.detach()
    wrapped: Any = plugged if wrap is not torch.compile else torch.compile(plugged, backend="eager")
    assert float(check_loss(wrapped, **batch()).difference) < 1e-5
    assert plugged.training and not plugged.model.layers[0].training
    assert torch.equal(plugged(**batch()).loss.detach(), before)


def test_refusals():
    with pytest.raises(ValueError, match=r"must have the plug-in, got a Linear without"):
        check_loss(nn.Linear(2, 2), labels=torch.ones(1))
    with pytest.raises(ValueError, match=r"batch must have labels, got \['input_ids'\]"):
        check_loss(ours(theirs()), input_ids=batch()["input_ids"])
