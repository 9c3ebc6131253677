"""A megatron-core ``GPTModel`` with linear_cross_entropy as its output layer and loss.

The same model runs on GPUs and on CPU. It is drawn on the CPU from one seed whatever the number
of tensor-parallel ranks, so that runs with different numbers of them start from the same weights
(unless the vocabulary needs padding for one of them).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flce_dist.launch.train.config import RunConfig
from flce_dist.launch.train.data import padded_rows
from flce_dist.launch.yaml_config import require
from flce_dist.megatron import use_linear_cross_entropy
from flce_dist.megatron.fused_layer import FusedLayer


class ParallelRMSNorm(nn.RMSNorm):
    """RMSNorm for megatron-core's layer specs; its own torch norm refuses sequence parallelism.

    Under sequence parallelism each rank normalises its own tokens, so gradients of the weight must
    be summed over the tensor-parallel group. The attribute says so, as Megatron's own norms do.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(nn.Module):
    """Core attention that makes no [s, s] mask; it takes the place of ``DotProductAttention``."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return [s, b, n * d] for query, key and value [s, b, n, d] of n heads on this rank."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def initialize_megatron(
    device: torch.device, seed: int, tensor: int, **sizes: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Create megatron-core's groups and random generators; collective.

    Returns this rank's tensor- and data-parallel group.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if device.type == "cpu":  # megatron-core asks for the current GPU, and takes any device
        cuda: Any = torch.cuda
        cuda.current_device = lambda: device
        cuda.current_stream = lambda device=None: None
    parallel_state.initialize_model_parallel(tensor, create_gloo_process_groups=False, **sizes)
    torch.manual_seed(seed)
    # The inference tracker is the one that forks no GPU generator.
    model_parallel_cuda_manual_seed(
        seed, inference_rng_tracker=device.type == "cpu", force_reset_rng=True
    )
    data = parallel_state.get_data_parallel_group()
    return parallel_state.get_tensor_model_parallel_group(), data


def build_model(config: RunConfig, vocab_size: int, device: torch.device) -> nn.Module:
    """Return the ``GPTModel`` of this rank, with the head of ``config.head``."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = config.model
    tensor = config.parallel.tensor
    transformer = TransformerConfig(
        num_layers=model.num_layers, hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads, ffn_hidden_size=model.ffn_hidden_size,
        tensor_model_parallel_size=tensor,
        sequence_parallel=config.parallel.sequence_parallel and tensor > 1,
        params_dtype=getattr(torch, model.dtype), bf16=model.dtype == "bfloat16",
        use_cpu_initialization=True, init_method_std=model.init_std, add_bias_linear=False,
        activation_func=F.gelu, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm",
        cross_entropy_loss_fusion=config.head.kind == "megatron_fused",
        cross_entropy_fusion_impl="native",
        # These fusions are compiled or GPU-only; the head is what this run is about.
        bias_dropout_fusion=False, masked_softmax_fusion=False, bias_activation_fusion=False,
        apply_rope_fusion=False, gradient_accumulation_fusion=False,
    )  # fmt: skip
    rows = padded_rows(vocab_size, config)  # our head leaves out those beyond vocab_size
    require(
        config.head.is_ours or rows == vocab_size,
        f"head.kind={config.head.kind} takes padding for vocabulary; parallel.tensor must "
        f"divide the {vocab_size} entries, got {tensor}",
    )
    gpt = GPTModel(
        config=transformer,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer_spec(CausalAttention)] * model.num_layers, layer_norm=ParallelRMSNorm
        ),
        vocab_size=rows,
        max_sequence_length=model.seq_length,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope",
    ).to(device)
    if config.head.is_ours:
        use_linear_cross_entropy(
            gpt,
            vocab_size=vocab_size,
            metrics=config.head.filter_eps is not None,
            **config.head.options(),
        )
    return gpt


def layer_spec(attention: type[nn.Module]) -> Any:
    """Return Megatron's own layer, without TransformerEngine, with our norm and an attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = ParallelRMSNorm
    layer.submodules.pre_mlp_layernorm = ParallelRMSNorm
    layer.submodules.self_attention.submodules.core_attention = attention
    return layer


def distribute(model: nn.Module) -> Any:
    """Wrap a model in Megatron's DDP, whose fp32 ``main_grad`` the head's backward adds to."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    wrapped = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        model,
    )
    if isinstance(model.output_layer, FusedLayer):
        # Of this layer alone: Megatron's need a CUDA extension for it.
        layer: Any = model.output_layer
        layer.gradient_accumulation_fusion = True
    return wrapped


def token_losses(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the loss [b, s] fp32 of ``labels`` [b, s] after ``tokens`` [b, s], causally.

    With head.schedule=in_forward it is their sum.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels)


def filter_shares(model: Any) -> dict[str, Tensor]:
    """Return what head.filter_eps kept and left out in the latest loss; {} without it."""
    metrics = getattr(model.output_layer, "last_metrics", None)
    if metrics is None:
        return {}
    return {"kept_share": metrics.kept_share, "rank_one_mass": metrics.rank_one_mass}
