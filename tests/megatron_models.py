"""The contract's models of megatron-core on gloo ranks, with the plug-in and without."""

from typing import Any

import torch
from torch import Tensor

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


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and labels, each [B, S]."""
    tokens, _, labels = models.batch(step)
    return tokens, labels


def inputs_of(tokens: Tensor) -> tuple[Tensor, Tensor, None]:
    """The arguments of ``GPTModel``: tokens, positions and no mask."""
    return tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None
