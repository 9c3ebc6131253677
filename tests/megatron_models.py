"""Small models of megatron-core on gloo ranks, with the plug-in and as Megatron has them."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from flce_dist.launch.train.config import ModelConfig, ParallelConfig, RunConfig
from flce_dist.launch.train.model import (
    Groups,
    ParallelRMSNorm,
    build_model,
    initialize_megatron,
    layer_spec,
    token_losses,
)
from flce_dist.megatron import use_linear_cross_entropy
from tests.tiny_training import forget_earlier_runs

VOCAB = 96
CONFIG = RunConfig(
    model=ModelConfig(
        hidden_size=32, num_layers=1, num_heads=4, ffn_hidden_size=32, seq_length=12, init_std=0.3
    )
)
H, S = CONFIG.model.hidden_size, CONFIG.model.seq_length


def build(tp: int, sp: bool, tied: bool, vocab: int = VOCAB) -> tuple[Any, Groups]:
    """A ``GPTModel`` with the plug-in, and new groups."""
    forget_earlier_runs()
    groups = initialize_megatron(config_of(tp, sp, tied), torch.device("cpu"))
    return build_another(tp, sp, tied, vocab), groups


def build_another(tp: int, sp: bool, tied: bool, vocab: int = VOCAB) -> Any:
    """The same model again, in the groups that there are."""
    config = config_of(tp, sp, tied)
    torch.manual_seed(config.seed)
    return build_model(config, vocab, torch.device("cpu"))


def config_of(tp: int, sp: bool, tied: bool) -> RunConfig:
    return replace(
        CONFIG,
        model=replace(CONFIG.model, tie_embeddings=tied),
        parallel=ParallelConfig(tensor=tp, sequence_parallel=sp),
    )


def build_with_mtp(sp: bool, depths: int) -> Any:
    """A tied model with multi-token prediction, which calls the output layer 1 + depths times."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = copy.copy(build(2, sp, tied=True)[0].config)
    config.mtp_num_layers, config.mtp_loss_scaling_factor = depths, 0.1
    block = TransformerBlockSubmodules(layer_specs=[layer_spec()], layer_norm=ParallelRMSNorm)
    mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    for depth in mtp.layer_specs:
        depth.submodules.enorm = depth.submodules.hnorm = ParallelRMSNorm
        depth.submodules.layer_norm = ParallelRMSNorm
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=VOCAB,
        max_sequence_length=CONFIG.model.seq_length,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
    )
    return use_linear_cross_entropy(model)


def as_megatron_has_it(model: Any) -> Any:
    """Undo ``use_linear_cross_entropy``."""
    _, model.output_layer.__class__ = type(model.output_layer).__bases__
    del model.compute_language_model_loss
    model._forward_pre_hooks.clear()
    model._forward_hooks.clear()
    model._load_state_dict_pre_hooks.clear()
    return model


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    ids = torch.randint(VOCAB, (3, CONFIG.model.seq_length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def inputs_of(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of ``GPTModel``: tokens, positions and the causal mask."""
    s = tokens.shape[1]
    mask = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    return tokens, torch.arange(s).expand_as(tokens), mask


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss and gradients of an uneven sum of it."""
    model.zero_grad()
    loss = token_losses(model, *batch())
    uneven(loss).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.clone()
    return loss.detach(), gradients


def uneven(loss: Tensor) -> Tensor:
    return (loss * torch.arange(loss.numel()).view_as(loss)).mean()


def fuse(model: Any, *, head_only: bool = False) -> Any:
    """Turn gradient_accumulation_fusion on, with Megatron's CUDA extension in PyTorch."""
    from megatron.core.tensor_parallel import layers

    def accumulate(x: Tensor, g: Tensor, main_grad: Tensor) -> None:
        main_grad.copy_(main_grad.float() + g.float().T @ x.float())

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    model.config.gradient_accumulation_fusion = True
    for module in [model.output_layer] if head_only else model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = True
    return model
