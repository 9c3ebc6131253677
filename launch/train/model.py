"""A megatron-core ``GPTModel`` with linear_cross_entropy as its output layer and loss.

The same model runs on GPUs and on CPU. It is drawn on the CPU from one seed whatever the number
of tensor-parallel ranks, so that runs with different numbers of them start from the same weights
(unless the vocabulary needs padding for one of them).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flce_dist.launch.train.config import RunConfig
from flce_dist.megatron import use_linear_cross_entropy


@dataclass(frozen=True)
class Groups:
    """The two process groups of this rank. World size = tensor size * data size."""

    tensor: dist.ProcessGroup
    data: dist.ProcessGroup


class ParallelRMSNorm(nn.RMSNorm):
    """RMSNorm for megatron-core's layer specs; its own torch norm refuses sequence parallelism.

    Under sequence parallelism each rank normalises its own tokens, so gradients of the weight must
    be summed over the tensor-parallel group. The attribute says so, as Megatron's own norms do.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def initialize_megatron(config: RunConfig, device: torch.device) -> Groups:
    """Create megatron-core's process groups and random generators; collective."""
    if device.type == "cpu":
        # megatron-core asks for the current GPU wherever it makes a buffer, and takes any device.
        torch.cuda.current_device = lambda: device  # type: ignore[assignment,return-value]

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(config.parallel.tensor)
    groups = Groups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
    )
    torch.manual_seed(config.seed)
    # The inference tracker is the one that forks no GPU generator.
    model_parallel_cuda_manual_seed(config.seed, inference_rng_tracker=device.type == "cpu")
    return groups


def build_model(config: RunConfig, vocab_size: int, device: torch.device) -> nn.Module:
    """Return the ``GPTModel`` of this rank; forward(tokens, labels) gives the loss [b, s]."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    model, tensor = config.model, config.parallel.tensor
    dtype = getattr(torch, model.dtype)

    def draw(weight: Tensor) -> Tensor:
        return nn.init.normal_(weight, std=model.init_std)

    def draw_residual(weight: Tensor) -> Tensor:
        return nn.init.normal_(weight, std=model.init_std / (2 * model.num_layers) ** 0.5)

    transformer = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        ffn_hidden_size=model.ffn_hidden_size,
        tensor_model_parallel_size=tensor,
        sequence_parallel=config.parallel.sequence_parallel and tensor > 1,
        params_dtype=dtype,
        bf16=model.dtype == "bfloat16",
        use_cpu_initialization=True,
        init_method=draw,
        output_layer_init_method=draw_residual,
        add_bias_linear=False,
        activation_func=F.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        # These fusions are compiled or GPU-only; the head is what this run is about.
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = ParallelRMSNorm
    layer.submodules.pre_mlp_layernorm = ParallelRMSNorm
    gpt = GPTModel(
        config=transformer,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer] * model.num_layers, layer_norm=ParallelRMSNorm
        ),
        # Each rank holds the same number of rows; the head leaves out those beyond vocab_size.
        vocab_size=-(-vocab_size // tensor) * tensor,
        max_sequence_length=model.seq_length,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope",
    ).to(device)
    use_linear_cross_entropy(gpt, vocab_size=vocab_size, **vars(config.head))
    return gpt


def token_losses(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the loss [b, s] fp32 of ``labels`` [b, s] after ``tokens`` [b, s], causally."""
    s = tokens.shape[1]
    positions = torch.arange(s, device=tokens.device).expand_as(tokens)
    future = torch.ones(1, 1, s, s, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens, positions, future, labels=labels)
