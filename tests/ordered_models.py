"""Models of megatron-core with a ``vocab_order``, shared by the tests of it."""

from typing import Any

import torch
from torch import nn

from flce_dist.filtered import VocabOrder, frequency_order
from flce_dist.megatron import use_linear_cross_entropy
from tests.megatron_models import VOCAB, megatron

EMBEDDING = "embedding.word_embeddings.weight"


def order_of(vocab: int = VOCAB, seed: int = 0) -> VocabOrder:
    return frequency_order(torch.rand(vocab, generator=torch.Generator().manual_seed(seed)))


def models(tp: int, sp: bool, tied: bool, vocab: int = VOCAB, **options: Any) -> tuple[Any, Any]:
    """Models of the same weights, without an order and with one; the head has a bias."""

    def with_bias(**more: Any) -> Any:
        layer = (model := megatron(tp, sp, tied)).output_layer
        bias = torch.randn(layer.output_size, generator=torch.Generator().manual_seed(3))
        layer.bias = nn.Parameter(bias.chunk(tp)[layer.tp_group.rank()].clone())
        return use_linear_cross_entropy(model, **options, **more)

    return with_bias(), with_bias(vocab_order=order_of(vocab))


def first_stage(tp: int) -> Any:
    stage = megatron(tp, sp=False, tied=True)
    stage.post_process = False
    del stage.output_layer
    return stage
