"""Language models beside GPT: T5, whose output layer has a bias, and the hybrid one (Mamba)."""

from typing import Any

from torch import nn

from flce_dist.launch.train.model import ParallelRMSNorm, layer_spec
from flce_dist.launch.train.optimizer import OnCpu
from tests.contract.models import VOCAB, S, Setting, ValuesOnly, config_of, initialize


def t5(at: Setting, tied: bool) -> Any:
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

        Stack, Submodules, name = block.HybridStack, block.HybridStackSubmodules, "hybrid"
        pattern = "hybrid_layer_pattern"
    except ImportError:
        from megatron.core.models.mamba import MambaModel as Model
        from megatron.core.ssm import mamba_block as block

        Stack, Submodules, name = block.MambaStack, block.MambaStackSubmodules, "mamba"
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
