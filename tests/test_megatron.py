"""The plug-in on forked gloo ranks, beside what it shares with Megatron (test_contract.py).

megatron-core keeps its process groups in globals of the process, so threads would not do.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("megatron.core")

from flce_dist.megatron import fused_layer, use_linear_cross_entropy
from flce_dist.testing import RankPool, relative_rms
from tests.megatron_models import VOCAB, H, S, batch, megatron, plugged, token_losses

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def rank_largest(group: Any, sp: bool) -> None:
    fused_layer._WINDOW = 10  # several windows, the last one short
    layer = plugged(group.size(), sp).output_layer
    layer.bias = torch.nn.Parameter(torch.randn(len(layer.weight)))
    hidden = torch.randn(S // (group.size() if sp else 1), 3, H)
    logits, gathered = layer(hidden)[0], layer(hidden, runtime_gather_output=True)[0]
    assert gathered.shape[-1] == VOCAB
    layer.is_lazy = True
    lazy, _ = layer(hidden)
    value, place = (lazy * -2.0).max(dim=-1)
    torch.testing.assert_close(value, -2 * logits.min(-1).values)
    assert torch.equal(place, logits.argmin(-1))
    assert lazy.size(-1) == logits.shape[-1]
    lazy_gathered, _ = layer(hidden, runtime_gather_output=True)
    assert torch.equal(torch.argmax(lazy_gathered, dim=-1), gathered.argmax(-1))
    with pytest.raises(TypeError):
        torch.exp(lazy)
    with pytest.raises(AttributeError, match="a forward hook on the output layer"):
        lazy.float()


@pytest.mark.parametrize("tp, sp", [(1, False), (2, False), (2, True)])
def test_the_largest_logit_without_logits(pools: dict[int, RankPool], tp: int, sp: bool) -> None:
    pools[tp].run(rank_largest, sp)


def rank_padded(group: Any) -> tuple[Tensor, Tensor]:
    # 95 entries on two ranks: 48 rows each, the last one is padding.
    model = plugged(2, sp=True, vocab_size=VOCAB - 1)
    tokens, labels = (ids.clamp(max=VOCAB - 2) for ids in batch())
    before = token_losses(model, tokens, labels)
    with torch.no_grad():
        model.output_layer.weight[VOCAB // 2 - 1 if group.rank() == 1 else VOCAB :] = 1e4
    return before.detach(), token_losses(model, tokens, labels).detach()


def test_padding_of_the_vocabulary_takes_no_part(pools: dict[int, RankPool]) -> None:
    for before, after in pools[2].run(rank_padded):
        assert torch.equal(before, after)


def rank_two_models(group: Any) -> None:
    model, other = plugged(1, sp=False), plugged(1, sp=False)
    names = sorted(model.state_dict())
    with torch.no_grad():
        other.output_layer.weight.zero_()
    uniform = token_losses(other, *batch())
    torch.testing.assert_close(uniform, torch.full_like(uniform, VOCAB).log())
    assert not torch.allclose(uniform, token_losses(model, *batch()))
    assert names == sorted(megatron(1, False, False).state_dict())


def test_models_do_not_mix_and_parameter_names_stay(pools: dict[int, RankPool]) -> None:
    pools[1].run(rank_two_models)


def rank_frozen(group: Any) -> None:
    model = plugged(2, sp=True)
    model.output_layer.gradient_accumulation_fusion = True
    weight = model.output_layer.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    hidden = torch.randn(S // 2, 3, H, requires_grad=True)
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


def test_a_frozen_or_detached_weight_leaves_main_grad_alone(ranks: RankPool) -> None:
    ranks.run(rank_frozen)


# --- the development branch


def development_layer() -> Any:
    """The development branch's layer; in a release, a subclass in its place."""
    import megatron.core.transformer as parent
    from megatron.core.tensor_parallel import ColumnParallelLinear

    name = "megatron.core.transformer.linear_cross_entropy"
    if find_spec(name) is not None:
        return import_module(name).LinearCrossEntropyModule

    class LinearCrossEntropyModule(ColumnParallelLinear):
        def forward(self, input_, weight=None, runtime_gather_output=None, **of_loss):
            assert not of_loss
            return super().forward(input_, weight, runtime_gather_output)

    LinearCrossEntropyModule.__module__ = name
    sys.modules[name] = module = ModuleType(name)
    vars(module)["LinearCrossEntropyModule"] = LinearCrossEntropyModule
    vars(parent)["linear_cross_entropy"] = module
    return LinearCrossEntropyModule


def rank_development_branch(group: Any) -> None:
    """Its layer is a subclass that can return a loss itself."""
    LinearCrossEntropyModule = development_layer()
    model = megatron(2, sp=True, tied=False)
    model.output_layer.__class__ = LinearCrossEntropyModule
    layer = use_linear_cross_entropy(model).output_layer
    assert type(layer).__name__ == "LinearCrossEntropyModule"
    assert isinstance(layer, LinearCrossEntropyModule)
    lazily = token_losses(model, *batch())
    hidden: list[Tensor] = []

    def catch(layer: Any, args: Any, kwargs: Any) -> None:
        hidden.append(args[0] if args else kwargs["input_"])

    handle = layer.register_forward_pre_hook(catch, with_kwargs=True)
    token_losses(model, *batch())
    handle.remove()
    fused = layer(hidden[0], output_cross_entropy_loss=True, labels=batch()[1])
    assert torch.equal(fused, lazily)
    total = layer(hidden[0], output_cross_entropy_loss=True, labels=batch()[1], reduction="sum")
    torch.testing.assert_close(total, lazily.sum())
    assert type(layer(hidden[0])[0]) is Tensor


def test_the_layer_of_the_development_branch(ranks: RankPool) -> None:
    ranks.run(rank_development_branch)


# --- filtered gradients: blocks of tokens are of one sequence each

SEQUENCES, TILE_T, TILE_V, WIDTH = 4, 128, 256, 16


def problem(s: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [s, b, WIDTH], weight, labels [s, b]: sequence i is about the rows of tile i."""
    generator = torch.Generator().manual_seed(0)
    own = 5.0 * torch.eye(SEQUENCES, WIDTH)
    hidden = own.expand(s, -1, -1) + 0.1 * torch.randn(s, SEQUENCES, WIDTH, generator=generator)
    weight = own.repeat_interleave(TILE_V, 0)
    weight = weight + 0.1 * torch.randn(weight.shape, generator=generator)
    labels = torch.randint(TILE_V, (s, SEQUENCES), generator=generator)
    return hidden, weight, labels + TILE_V * torch.arange(SEQUENCES)


def rank_blocks(group: Any, tp: int, sp: bool) -> None:
    rank, s = group.rank(), TILE_T * (tp if sp else 1)
    model = megatron(tp, sp, False)
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
