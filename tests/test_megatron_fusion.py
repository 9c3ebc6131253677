"""gradient_accumulation_fusion where Megatron passes a weight that takes no gradient."""

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from flce_dist.testing import RankPool
from tests.megatron_models import CONFIG, batch, build

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def rank_frozen(group: Any) -> None:
    model = build(2, sp=True, tied=False)[0]
    model.output_layer.gradient_accumulation_fusion = True
    weight = model.output_layer.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    hidden = torch.randn(6, 3, CONFIG.model.hidden_size, requires_grad=True)
    labels = batch()[1].T

    def backward(weight: Any) -> None:
        hidden.grad = None
        model.output_layer.token_loss(hidden, weight, labels).sum().backward()
        assert hidden.grad is not None and hidden.grad.any()

    backward(weight.detach())
    weight.requires_grad_(False)
    backward(weight)
    assert (weight.main_grad == 1).all() and weight.grad is None
    assert weight.grad_added_to_main_grad is False
    weight.requires_grad_(True)
    backward(weight)
    assert weight.grad_added_to_main_grad is True and not (weight.main_grad == 1).any()


def test_a_frozen_or_detached_weight_leaves_main_grad_alone() -> None:
    with RankPool(2) as pool:
        pool.run(rank_frozen)
