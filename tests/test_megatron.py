"""The adapter against megatron-core's own output layer and loss, in forked ranks over gloo.

megatron-core keeps its process groups in globals of the process, so threads would not do.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megatron.core")

from flce_dist import megatron as adapter
from flce_dist.launch.train.config import ModelConfig, ParallelConfig, RunConfig
from flce_dist.launch.train.model import (
    Groups,
    ParallelRMSNorm,
    build_model,
    initialize_megatron,
    token_losses,
)
from flce_dist.megatron import use_linear_cross_entropy
from flce_dist.testing import RankPool, relative_rms

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

VOCAB = 96
CONFIG = RunConfig(
    model=ModelConfig(
        hidden_size=32, num_layers=1, num_heads=2, ffn_hidden_size=32, seq_length=12, init_std=0.3
    )
)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(1) as one, RankPool(2) as two:
        yield {1: one, 2: two}


def build(tp: int, sp: bool, tied: bool, vocab: int = VOCAB) -> tuple[Any, Groups]:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, tie_embeddings=tied),
        parallel=ParallelConfig(tensor=tp, sequence_parallel=sp),
    )
    device = torch.device("cpu")
    groups = initialize_megatron(config, device)
    return build_model(config, vocab, device), groups


def as_megatron_has_it(model: Any) -> Any:
    """Undo ``use_linear_cross_entropy``."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    model.output_layer.__class__ = ColumnParallelLinear
    del model.compute_language_model_loss
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (3, CONFIG.model.seq_length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss and gradients of an uneven sum of it."""
    model.zero_grad()
    loss = token_losses(model, *batch())
    (loss * torch.arange(loss.numel()).view_as(loss)).mean().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.clone()
    return loss.detach(), gradients


def rank_against_megatron(group: Any, tp: int, sp: bool, tied: bool) -> Any:
    model, _ = build(tp, sp, tied)
    ours = loss_and_gradients(model)
    assert type(model.output_layer).__name__ == "LinearCrossEntropyOutputLayer"
    return ours, loss_and_gradients(as_megatron_has_it(model))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("tp, sp", [(1, False), (2, False), (2, True)])
def test_loss_and_every_gradient_are_megatrons(
    pools: dict[int, RankPool], tp: int, sp: bool, tied: bool
) -> None:
    losses = []
    for ours, theirs in pools[tp].run(rank_against_megatron, tp, sp, tied):
        assert ours[0].shape == (3, CONFIG.model.seq_length) and ours[0].dtype == torch.float32
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
        assert ours[1].keys() == theirs[1].keys()
        assert ("output_layer.weight" in ours[1]) != tied
        for name, gradient in theirs[1].items():
            assert gradient.norm() > 0, name
            assert relative_rms(ours[1][name], gradient) < 1e-5, name
        losses.append(ours[0])
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def rank_mutated(group: Any) -> Any:
    model = build(2, sp=True, tied=True)[0]
    model.output_layer.loss_keywords["label_smoothing"] = 1e-3
    return loss_and_gradients(model), loss_and_gradients(as_megatron_has_it(model))


def test_the_comparison_would_notice_a_slightly_wrong_head(pools: dict[int, RankPool]) -> None:
    for ours, theirs in pools[2].run(rank_mutated):
        assert not torch.allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
        for name, gradient in theirs[1].items():
            assert relative_rms(ours[1][name], gradient) > 1e-5, name


def rank_logits(group: Any, sp: bool, gather: bool) -> tuple[Tensor, Tensor]:
    model, _ = build(2, sp, tied=True)
    tokens, _ = batch()

    def logits(model: Any) -> Tensor:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        return model(tokens, positions, mask, runtime_gather_output=gather).detach()

    return logits(model), logits(as_megatron_has_it(model))


@pytest.mark.parametrize("sp, gather", [(True, False), (True, True), (False, True)])
def test_without_labels_the_logits_are_real(
    pools: dict[int, RankPool], sp: bool, gather: bool
) -> None:
    for ours, theirs in pools[2].run(rank_logits, sp, gather):
        assert ours.shape == (3, CONFIG.model.seq_length, VOCAB if gather else VOCAB // 2)
        assert torch.equal(ours, theirs)


def rank_largest(group: Any, sp: bool) -> None:
    adapter._WINDOW = 10  # several windows, the last one short
    model, _ = build(group.size(), sp, tied=False)
    hidden = torch.randn(12 // (group.size() if sp else 1), 3, CONFIG.model.hidden_size)
    lazy, _ = model.output_layer(hidden)
    logits = lazy.materialize()
    value, place = lazy.max(dim=-1)
    torch.testing.assert_close(value, logits.max(-1).values)
    assert torch.equal(place, logits.argmax(-1))
    assert lazy.size(-1) == logits.shape[-1]
    gathered, _ = model.output_layer(hidden, runtime_gather_output=True)
    expected = gathered.materialize()
    assert expected.shape[-1] == VOCAB
    assert torch.equal(torch.argmax(gathered, dim=-1), expected.argmax(-1))
    with pytest.raises(TypeError):
        torch.exp(lazy)


@pytest.mark.parametrize("tp, sp", [(1, False), (2, False), (2, True)])
def test_the_largest_logit_without_logits(pools: dict[int, RankPool], tp: int, sp: bool) -> None:
    pools[tp].run(rank_largest, sp)


def rank_hooks(group: Any) -> list[str]:
    """The weight is only there during calls of the layer, as under parameter sharding."""
    model, _ = build(2, sp=True, tied=False)
    layer: Any = model.output_layer
    weight, calls = layer.weight.data.clone(), []

    def gather(*_: Any) -> None:
        calls.append("gather")
        layer.weight.data.copy_(weight)

    def release(*_: Any) -> None:
        calls.append("release")
        layer.weight.data.fill_(float("nan"))

    release()
    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(release)
    assert token_losses(model, *batch()).isfinite().all()
    return calls


def test_each_use_of_the_weight_is_inside_a_call_of_the_layer(pools: dict[int, RankPool]) -> None:
    for calls in pools[2].run(rank_hooks):
        assert calls == ["release"] + ["gather", "release"] * (len(calls) // 2)


def rank_padded(group: Any) -> tuple[Tensor, Tensor]:
    # 95 entries on two ranks: 48 rows each, the last one is padding.
    model, _ = build(2, sp=True, tied=False, vocab=VOCAB - 1)
    tokens, labels = (ids.clamp(max=VOCAB - 2) for ids in batch())
    before = token_losses(model, tokens, labels)
    with torch.no_grad():
        model.output_layer.weight[VOCAB // 2 - 1 if group.rank() == 1 else VOCAB :] = 1e4
    return before.detach(), token_losses(model, tokens, labels).detach()


def test_padding_of_the_vocabulary_takes_no_part(pools: dict[int, RankPool]) -> None:
    for before, after in pools[2].run(rank_padded):
        assert torch.equal(before, after)


def rank_two_models(group: Any) -> None:
    model, _ = build(1, sp=False, tied=False)
    other, _ = build(1, sp=False, tied=False)
    names = sorted(model.state_dict())
    with torch.no_grad():
        other.output_layer.weight.zero_()
    uniform = token_losses(other, *batch())
    torch.testing.assert_close(uniform, torch.full_like(uniform, VOCAB).log())
    assert not torch.allclose(uniform, token_losses(model, *batch()))
    assert names == sorted(as_megatron_has_it(model).state_dict())


def test_models_do_not_mix_and_parameter_names_stay(pools: dict[int, RankPool]) -> None:
    pools[1].run(rank_two_models)


def build_with_mtp(sp: bool, depths: int) -> nn.Module:
    """A tied model with multi-token prediction, which calls the output layer 1 + depths times."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = copy.copy(build(2, sp, tied=True)[0].config)
    config.mtp_num_layers, config.mtp_loss_scaling_factor = depths, 0.1
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = ParallelRMSNorm
    block = TransformerBlockSubmodules(layer_specs=[layer], layer_norm=ParallelRMSNorm)
    mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    for depth in mtp.layer_specs:
        depth.submodules.enorm = depth.submodules.hnorm = ParallelRMSNorm
        depth.submodules.layer_norm = ParallelRMSNorm
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=VOCAB,
        max_sequence_length=CONFIG.model.seq_length,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
    )


def rank_mtp(group: Any, sp: bool) -> Any:
    model = build_with_mtp(sp, depths=2)
    use_linear_cross_entropy(model)
    return loss_and_gradients(model), loss_and_gradients(as_megatron_has_it(model))


@pytest.mark.parametrize("sp", [False, True])
def test_multi_token_prediction(pools: dict[int, RankPool], sp: bool) -> None:
    for ours, theirs in pools[2].run(rank_mtp, sp):
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
        assert any("mtp" in name for name in theirs[1])
        for name, gradient in theirs[1].items():
            assert gradient.norm() > 0, name
            assert relative_rms(ours[1][name], gradient) < 1e-5, name


def rank_refusals(group: Any) -> None:
    model = build(1, sp=False, tied=True)[0]
    with pytest.raises(ValueError, match="twice"):
        use_linear_cross_entropy(model)
    as_megatron_has_it(model)
    for name in ("gradient_accumulation_fusion", "defer_embedding_wgrad_compute", "use_mup"):
        setattr(model.config, name, True)
        with pytest.raises(NotImplementedError, match=f"config.{name}=True"):
            use_linear_cross_entropy(model)
        setattr(model.config, name, False)
    with pytest.raises(NotImplementedError, match='schedule="in_forward"'):
        use_linear_cross_entropy(model, schedule="in_forward")
    wrong: list[Any] = [{"label_smoothing": 2.0}, {"vocab_size": True}, {"vocab_size": 1 << 20}]
    for option in wrong:
        with pytest.raises(ValueError, match=f"^{next(iter(option))} must be "):
            use_linear_cross_entropy(model, **option)
    layer, model.output_layer = model.output_layer, nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match="ColumnParallelLinear, got Linear"):
        use_linear_cross_entropy(model)
    del model.output_layer
    with pytest.raises(ValueError, match="pipeline stages"):
        use_linear_cross_entropy(model)
    model.output_layer = layer
    use_linear_cross_entropy(model)


def test_what_is_not_supported_is_refused(pools: dict[int, RankPool]) -> None:
    pools[1].run(rank_refusals)
