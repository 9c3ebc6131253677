"""The oracle itself: what it reads of ignored tokens, and shapes that it promises."""

import pytest
import torch
from torch import Tensor

from flce_dist.reference import (
    reference_linear_cross_entropy,
    reference_linear_divergence,
    reference_linear_logprob,
    reference_linear_top_k,
)

T, V, H = 6, 9, 4
LABELS = torch.tensor([1, -100, 8, 0, -100, 3])
IGNORED = LABELS == -100


def operands() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=g, dtype=torch.float64) for n in (T, V))
    return hidden.requires_grad_(), weight.requires_grad_()


def loss_of(call: str, hidden: Tensor, weight: Tensor, token_weight: Tensor) -> Tensor:
    if call == "loss":
        return reference_linear_cross_entropy(hidden, weight, LABELS, token_weight=token_weight)[0]
    teacher = torch.ones(T, H, dtype=torch.float64), torch.eye(V, H, dtype=torch.float64)
    return reference_linear_divergence(
        hidden, weight, *teacher, labels=LABELS, token_weight=token_weight
    )[0]


@pytest.mark.parametrize("call", ["loss", "divergence"])
def test_a_weight_of_an_ignored_token_is_not_read(call):
    hidden, weight = operands()
    of_tokens = torch.linspace(1, 2, T, dtype=torch.float64)
    expected = torch.autograd.grad(loss_of(call, hidden, weight, of_tokens), (hidden, weight))
    for unread in (torch.nan, torch.inf):
        loss = loss_of(call, hidden, weight, of_tokens.masked_fill(IGNORED, unread))
        found = torch.autograd.grad(loss, (hidden, weight))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_nothing_of_an_ignored_token_reaches_gradients_where_all_ids_are_banned():
    hidden, weight = operands()
    ids = torch.where(IGNORED, -1, LABELS)[:, None]
    bias = torch.full((V,), -torch.inf, dtype=torch.float64)
    scores = reference_linear_logprob(hidden, weight, ids, bias=bias)
    (dhidden,) = torch.autograd.grad(scores[0].sum(), hidden)
    assert dhidden.isnan().all(1).equal(~IGNORED)
    only_ignored = torch.full_like(ids, -1)
    scores = reference_linear_logprob(hidden, weight, only_ignored, bias=bias)
    dweight = torch.autograd.grad(scores[0].sum() + scores[1].sum(), weight)[0]
    assert not dweight.any()


def test_a_loss_without_z_loss_does_not_square_lse():
    """Beyond 2^64 its square is inf in fp32."""
    hidden, weight = (x.detach().float() for x in operands())
    of_each = torch.full((T,), 2.0**-70)
    loss, lse, *_ = reference_linear_cross_entropy(hidden, weight, LABELS, temperature=of_each)
    assert lse.abs().max() > 2.0**64
    assert loss.isfinite()


def test_more_best_ids_than_there_are():
    hidden, weight = operands()
    few = reference_linear_top_k(hidden, weight, V)
    many = reference_linear_top_k(hidden, weight, V + 2)
    assert torch.equal(many[0][:, :V], few[0]) and (many[0][:, V:] == -1).all()
    assert torch.equal(many[1][:, :V], few[1]) and many[1][:, V:].isneginf().all()
