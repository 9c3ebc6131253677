"""Small language models of any megatron-core on gloo ranks, drawn from one seed.

Attention returns its values: it takes part in no line of the contract, and Megatron's own refuses
context parallelism and packed sequences without TransformerEngine.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce_dist.launch.train.model import ParallelRMSNorm, initialize_megatron, layer_spec
from flce_dist.launch.train.optimizer import OnCpu
from tests.shared_groups import group_of

VOCAB, H, S, B = 96, 32, 16, 2


@dataclass(frozen=True)
class Setting:
    """Tensor-parallel size and sequence parallelism; there are twice as many ranks."""

    tp: int
    sp: bool

    def __str__(self) -> str:
        return f"TP {self.tp}" + (" SP" if self.sp else "")


SETTINGS = (Setting(1, False), *(Setting(tp, sp) for tp in (2, 4) for sp in (False, True)))
"""Megatron has no sequence parallelism without tensor parallelism."""


class ValuesOnly(nn.Module):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Tensor:
        return value.flatten(-2)


def initialize(at: Setting, *, cp: int = 1, pp: int = 1) -> None:
    """Create the process groups and random generators of a model; collective."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers

    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    parallel_state.create_group = group_of
    parallel_state.destroy_model_parallel()
    sizes = {"pipeline_model_parallel_size": pp, "context_parallel_size": cp}
    initialize_megatron(torch.device("cpu"), 1, at.tp, **sizes)


def accumulate(x: Tensor, g: Tensor, main_grad: Tensor) -> None:
    """What the CUDA extension that Megatron calls for its fusion does."""
    main_grad.copy_(main_grad.float() + g.float().T @ x.float())


def config_of(at: Setting, *, cp: int = 1, pp: int = 1, **changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    def draw(weight: Tensor) -> Tensor:
        return nn.init.normal_(weight, std=0.3)

    settings = {
        "num_layers": pp, "hidden_size": H, "num_attention_heads": 4, "ffn_hidden_size": H,
        "tensor_model_parallel_size": at.tp, "sequence_parallel": at.sp,
        "context_parallel_size": cp, "pipeline_model_parallel_size": pp,
        "params_dtype": torch.bfloat16 if changes.get("bf16") else torch.float32,
        "pipeline_dtype": torch.float32, "batch_p2p_comm": False,
        "use_cpu_initialization": True, "init_method": draw, "output_layer_init_method": draw,
        "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "normalization": "RMSNorm", "gradient_accumulation_fusion": False,
        # Compiled, or of GPUs only.
        "bias_dropout_fusion": False, "masked_softmax_fusion": False,
        "bias_activation_fusion": False, "apply_rope_fusion": False,
    }  # fmt: skip
    return TransformerConfig(**{**settings, **changes})


def gpt(
    at: Setting, *, tied: bool = False, cp: int = 1, pp: int = 1, mtp: int = 0, **changes: Any
) -> Any:
    """This rank's stage of a ``GPTModel``, with ``mtp`` depths of multi-token prediction."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    initialize(at, cp=cp, pp=pp)
    if mtp:
        changes.update(mtp_num_layers=mtp, mtp_loss_scaling_factor=0.5)
        # Or it has as many losses as an earlier model of this process had depths.
        multi_token_prediction.MTPLossLoggingHelper.tracker.clear()
    config = config_of(at, cp=cp, pp=pp, **changes)
    block = TransformerBlockSubmodules([layer_spec(ValuesOnly)], layer_norm=ParallelRMSNorm)
    depths = None
    if mtp:
        depths = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
        for depth in depths.layer_specs if depths is not None else ():  # of the last stage
            depth.submodules.enorm = depth.submodules.hnorm = ParallelRMSNorm
            depth.submodules.layer_norm = ParallelRMSNorm
    with OnCpu():
        return GPTModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=VOCAB,
            max_sequence_length=S,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",
            mtp_block_spec=depths,
        )


def in_ddp(model: Any, **options: Any) -> Any:
    """Wrap a model as Megatron's training does, with fp32 main_grads unless ``options`` differ."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    stage = Float16Module(model.config, model) if model.config.bf16 else model
    config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **options})
    wrapped = DistributedDataParallel(model.config, config, stage)
    wrapped.zero_grad_buffer()
    return wrapped


def batch(step: int = 0, cp: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and labels, each [B, S / cp] int64, of this rank and microbatch."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    generator = torch.Generator().manual_seed(1 + 100 * rank + step)
    ids = torch.randint(VOCAB, (B, S // cp + 1), generator=generator)
    return ids[:, :-1], torch.arange(S // cp).expand(B, -1), ids[:, 1:].contiguous()


def packing_of(tokens: Tensor) -> Any:
    """Three sequences in one row."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, 5, 12, tokens.numel()], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=20, max_seqlen_kv=20
    )


def uneven(loss: Tensor) -> Tensor:
    """A sum of all tokens' losses, each with a weight of its own."""
    return (loss * torch.arange(loss.numel()).view_as(loss)).mean()


def agree(loss: Tensor) -> None:
    """The loss is the same on all tensor-parallel ranks, to the bit."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    both = [torch.empty_like(loss) for _ in range(group.size())]
    dist.all_gather(both, loss.detach().contiguous(), group=group)
    assert all(torch.equal(other, loss) for other in both), "the loss differs between ranks"


def t5(at: Setting, tied: bool) -> Any:
    """The output layer has a bias if it is tied to the embedding."""
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    initialize(at)
    blocks = []
    for spec in (t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()):
        for norm in ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm"):
            setattr(spec.submodules, norm, ParallelRMSNorm)
        blocks.append(TransformerBlockSubmodules([spec], layer_norm=ParallelRMSNorm))
    config = config_of(at)
    with OnCpu():
        model = T5Model(
            config, config, *blocks, VOCAB, S, position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
        )  # fmt: skip
    assert (model.output_layer.bias is not None) == tied
    if tied:
        nn.init.normal_(model.output_layer.bias)
    return model


def hybrid(at: Setting) -> Any:
    """An attention and an MLP layer: those with a state space need a GPU."""
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    try:
        from megatron.core.models.hybrid import hybrid_block as block
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Model

        Stack = block.HybridStack
        Submodules = block.HybridStackSubmodules
        name = "hybrid"
        pattern = "hybrid_layer_pattern"
    except ImportError:
        from megatron.core.models.mamba import MambaModel as Model
        from megatron.core.ssm import mamba_block as block

        Stack = block.MambaStack
        Submodules = block.MambaStackSubmodules
        name = "mamba"
        pattern = "hybrid_override_pattern"

    initialize(at)
    block.TENorm = lambda config, hidden_size, **_: ParallelRMSNorm(config, hidden_size)
    gpt = layer_spec(ValuesOnly).submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=ParallelRMSNorm,
        self_attention=gpt.self_attention,
        self_attn_bda=gpt.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=ParallelRMSNorm, mlp=gpt.mlp, mlp_bda=gpt.mlp_bda
    )
    layers = Submodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
    )
    stack = {f"{name}_stack_spec": ModuleSpec(module=Stack, submodules=layers), pattern: "*-"}
    with OnCpu():
        return Model(
            config=config_of(at, num_layers=2), vocab_size=VOCAB, max_sequence_length=S,
            position_embedding_type="none", share_embeddings_and_output_weights=False, **stack,
        )  # fmt: skip
