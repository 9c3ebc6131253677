"""The contract's models of megatron-core on gloo ranks, with the plug-in and without."""

from typing import Any

import torch
from torch import Tensor, nn

from flce_dist.filtered import VocabOrder, frequency_order
from flce_dist.launch.train.model import token_losses
from flce_dist.megatron import use_linear_cross_entropy
from tests.contract import models
from tests.contract.models import VOCAB, H, S, Setting, gpt

__all__ = ["VOCAB", "H", "S", "batch", "megatron", "plugged", "token_losses"]

EMBEDDING = "embedding.word_embeddings.weight"


def megatron(tp: int, sp: bool, tied: bool, **options: Any) -> Any:
    """A ``GPTModel`` as Megatron has it; the same weights whenever it is built."""
    return gpt(Setting(tp, sp), tied=tied, **options)


def plugged(tp: int, sp: bool, tied: bool = False, *, mtp: int = 0, **options: Any) -> Any:
    """The same model with the plug-in."""
    return use_linear_cross_entropy(megatron(tp, sp, tied, mtp=mtp), **options)


def order_of(vocab: int = VOCAB, seed: int = 0) -> VocabOrder:
    return frequency_order(torch.rand(vocab, generator=torch.Generator().manual_seed(seed)))


def plain_and_ordered(tp: int, sp: bool, tied: bool, *, mtp: int = 0, **options: Any) -> list[Any]:
    """Models of the same weights, without an order and with one; the head has a bias."""
    found: list[Any] = []
    orders: list[Any] = [None, order_of(options.get("vocab_size", VOCAB))]
    for order in orders:
        layer = (model := megatron(tp, sp, tied, mtp=mtp)).output_layer
        bias = torch.randn(layer.output_size, generator=torch.Generator().manual_seed(3))
        layer.bias = nn.Parameter(bias.chunk(tp)[layer.tp_group.rank()].clone())
        found.append(use_linear_cross_entropy(model, vocab_order=order, **options))
    heads = [m.embedding.word_embeddings if tied else m.output_layer for m in found]
    assert not torch.equal(heads[0].weight, heads[1].weight)
    return found


def first_stage(tp: int) -> Any:
    stage = megatron(tp, sp=False, tied=True)
    stage.post_process = False
    del stage.output_layer
    return stage


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and labels, each [B, S]."""
    tokens, _, labels = models.batch(step)
    return tokens, labels


def inputs_of(tokens: Tensor) -> tuple[Tensor, Tensor, None]:
    """The arguments of ``GPTModel``: tokens, positions and no mask."""
    return tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None
