"""The plug-in in models of megatron-core beside GPT, and in its development branch."""

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megatron.core")

from flce_dist.launch.train.model import ParallelRMSNorm, layer_spec, token_losses
from flce_dist.megatron import use_linear_cross_entropy
from flce_dist.testing import RankPool, relative_rms
from tests.megatron_models import (
    CONFIG,
    VOCAB,
    as_megatron_has_it,
    batch,
    build,
    loss_and_gradients,
    uneven,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

H, S = CONFIG.model.hidden_size, CONFIG.model.seq_length


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def rank_t5(group: Any, tied: bool) -> None:
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )

    config = build(2, sp=False, tied=False)[0].config
    config.normalization = "LayerNorm"
    model = T5Model(
        config, config, get_t5_encoder_with_local_block_spec(1),
        get_t5_decoder_with_local_block_spec(1), VOCAB, S, share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    )  # fmt: skip
    layer = use_linear_cross_entropy(model).output_layer
    assert (layer.bias is not None) == tied
    if tied:
        nn.init.normal_(layer.bias)
    tokens, labels = batch()
    mask = torch.zeros(3, 1, S, S, dtype=torch.bool)
    parameters = [layer.bias] if tied else [layer.weight]
    seen = []

    def results(model: Any) -> Any:
        loss = model(tokens, tokens, mask, mask, mask, lm_labels=labels)
        logits = model(tokens, tokens, mask, mask, mask)
        return loss, *torch.autograd.grad(uneven(loss), parameters), logits

    layer.register_forward_pre_hook(lambda *given: seen.append(1))
    ours = results(model)
    assert len(seen) == 3  # twice for a loss: lazily, and to compute it
    for mine, other in zip(ours, results(as_megatron_has_it(model)), strict=True):
        assert relative_rms(mine, other) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_t5_and_its_bias(ranks: RankPool, tied: bool) -> None:
    ranks.run(rank_t5, tied)


def hybrid_model(config: Any) -> Any:
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

    block.TENorm = lambda config, hidden_size, **_: ParallelRMSNorm(config, hidden_size)
    gpt = layer_spec().submodules
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
    return Model(
        config=config, vocab_size=VOCAB, max_sequence_length=S, position_embedding_type="rope",
        share_embeddings_and_output_weights=False, **stack,
    )  # fmt: skip


def rank_hybrid(group: Any) -> None:
    config = build(2, sp=True, tied=False)[0].config
    config.num_layers = 2
    model = use_linear_cross_entropy(hybrid_model(config))
    seen: list[int] = []
    model.output_layer.register_forward_pre_hook(lambda *given: seen.append(1))
    loss, gradients = loss_and_gradients(model)
    assert len(seen) == 2  # lazily, and to compute the loss
    their_loss, theirs = loss_and_gradients(as_megatron_has_it(model))
    assert relative_rms(loss, their_loss) < 1e-5
    for name, gradient in theirs.items():
        assert relative_rms(gradients[name], gradient) < 1e-5, name


def test_mamba_and_hybrid_models(ranks: RankPool) -> None:
    ranks.run(rank_hybrid)


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
    model = as_megatron_has_it(build(2, sp=True, tied=False)[0])
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
