"""Filtered gradients in megatron-core's layers: blocks of tokens are of one sequence each."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("megatron.core")

from flce_dist.megatron import use_linear_cross_entropy
from flce_dist.testing import RankPool, relative_rms
from tests.megatron_models import as_megatron_has_it, build

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SEQUENCES, TILE_T, TILE_V, H = 4, 128, 256, 16


def problem(s: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [s, b, H], weight [V, H], labels [s, b]: sequence i is about the rows of tile i."""
    generator = torch.Generator().manual_seed(0)
    own = 5.0 * torch.eye(SEQUENCES, H)
    hidden = own.expand(s, -1, -1) + 0.1 * torch.randn(s, SEQUENCES, H, generator=generator)
    weight = own.repeat_interleave(TILE_V, 0)
    weight = weight + 0.1 * torch.randn(weight.shape, generator=generator)
    labels = torch.randint(TILE_V, (s, SEQUENCES), generator=generator)
    return hidden, weight, labels + TILE_V * torch.arange(SEQUENCES)


def rank_blocks(group: Any, tp: int, sp: bool) -> None:
    rank, s = group.rank(), TILE_T * (tp if sp else 1)
    model = as_megatron_has_it(build(tp, sp, False)[0])
    use_linear_cross_entropy(model, filter_eps=2.0**-10, impl="eager", metrics=True)
    layer = model.output_layer
    hidden, weight, labels = problem(s)
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden @ weight.T
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    expected = expected.view(labels.shape)
    upstream = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1))
    dhidden, dweight = torch.autograd.grad(expected, (hidden, weight), upstream)

    mine = hidden.chunk(tp)[rank] if sp else hidden
    mine, own = mine.detach().requires_grad_(), weight.chunk(tp)[rank].detach().requires_grad_()
    loss = layer.token_loss(mine, own, labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(layer.last_metrics.lse, logits.logsumexp(-1).T)
    # In the order [s, b] every block would hold tokens of all sequences, and keep all tiles.
    assert layer.last_metrics.kept_share == 1 / SEQUENCES
    found = torch.autograd.grad(loss, (mine, own), upstream)
    assert relative_rms(found[0], dhidden.chunk(tp)[rank] if sp else dhidden) < 1e-5
    assert relative_rms(found[1], dweight.chunk(tp)[rank]) < 1e-5


@pytest.mark.parametrize("tp, sp", [(1, False), (2, False), (2, True)])
def test_blocks_are_of_one_sequence(pools: dict[int, RankPool], tp: int, sp: bool) -> None:
    pools[tp].run(rank_blocks, tp, sp)
