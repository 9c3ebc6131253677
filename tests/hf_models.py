"""Tiny causal language models of transformers, one of each kind, and a step of training."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

from flce_dist.hf import use_linear_cross_entropy

transformers.logging.set_verbosity_error()

VOCAB, B, S = 98, 2, 12
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_HEADS: dict[str, Any] = {**_SIZES, "head_dim": 8}
_ROUTED = dict(num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.5)
_GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)
_MAMBA = dict(
    mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8
)  # fmt: skip

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES),
    "qwen3, tied": ("Qwen3", {**_HEADS, "tie_word_embeddings": True}),
    "gemma2, softcap": ("Gemma2", {**_HEADS, "final_logit_softcapping": 0.7}),
    "gemma3, softcap": ("Gemma3Text", {**_HEADS, "final_logit_softcapping": 0.7}),
    "granite, quotient": ("Granite", {**_SIZES, "logits_scaling": 0.3}),
    "cohere, product": ("Cohere", {**_SIZES, "logit_scale": 3.0}),
    "falcon-h1, product": ("FalconH1", {**_HEADS, **_MAMBA, "lm_head_multiplier": 0.4}),
    "mixtral, auxiliary loss": ("Mixtral", {**_SIZES, **_ROUTED, "num_local_experts": 4}),
    "qwen3-moe, auxiliary loss": (
        "Qwen3Moe", {**_HEADS, **_ROUTED, "num_experts": 4, "moe_intermediate_size": 16},
    ),
    "phi, bias": ("Phi", _SIZES),
    "gpt2, tied": ("GPT2", _GPT2),
    "bert, head with layers": ("Bert", {**_SIZES, "is_decoder": True}),
}  # fmt: skip


def theirs(kind: str = "llama", **changes: Any) -> Any:
    """The model as transformers has it, in training mode; the same weights whenever it is built."""
    name, sizes = KINDS[kind]
    sizes = {**sizes, "attn_implementation": "eager", **changes}
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3) if p.dim() > 1 else p.data.add_(0.1 * torch.randn_like(p))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def ours(model: Any, **options: Any) -> Any:
    """A copy of the model with the plug-in."""
    return use_linear_cross_entropy(copy.deepcopy(model), **options)


def batch(rows: int = B) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (rows, S), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(S) < 4, -100)}


@contextmanager
def real_logits(vocab: int = VOCAB) -> Iterator[list[Any]]:
    """Note the shape of all logits [..., vocab] that any layer makes."""
    made: list[Any] = []
    linear = nn.functional.linear

    def noted(x: Any, weight: Any, bias: Any = None) -> Any:
        result = linear(x, weight, bias)
        if result.shape[-1] == vocab:
            made.append(tuple(result.shape))
        return result

    with mock.patch.object(nn.functional, "linear", noted):
        yield made


def step(model: Any, *, may_warn: bool = False, **given: Any) -> dict[str, Any]:
    """Return the loss and the gradients, None where one is of rounding alone.

    That of a key's bias is 0 but for rounding.
    """
    model.zero_grad()
    with warnings.catch_warnings():
        if not may_warn:
            warnings.filterwarnings("error", "the loss is computed from real logits")
        loss = model(**{**batch(), **given}).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def gradients(model: Any) -> dict[str, Any]:
    """Return the gradients, those of DTensors whole."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}
    least = 1e-6 * max(x.norm() for x in found.values())
    return {name: x if x.norm() > least else None for name, x in found.items()}
