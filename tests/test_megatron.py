"""The adapter against megatron-core's own output layer and loss, in forked ranks over gloo.

megatron-core keeps its process groups in globals of the process, so threads would not do.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from flce_dist.launch.train.config import ParallelConfig
from flce_dist.launch.train.model import build_model, token_losses
from flce_dist.megatron import fused_layer
from flce_dist.testing import RankPool, relative_rms
from tests.megatron_models import (
    CONFIG,
    VOCAB,
    as_megatron_has_it,
    batch,
    build,
    build_with_mtp,
    inputs_of,
    loss_and_gradients,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(1) as one, RankPool(2) as two:
        yield {1: one, 2: two}


def rank_against_megatron(group: Any, tp: int, sp: bool, tied: bool) -> Any:
    model, _ = build(tp, sp, tied)
    ours = loss_and_gradients(model)
    layer = model.output_layer
    assert isinstance(layer, fused_layer.FusedLayer)
    name = type(layer).__name__
    theirs = loss_and_gradients(as_megatron_has_it(model))
    assert type(layer).__name__ == name
    return ours, theirs


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
        return model(*inputs_of(tokens), runtime_gather_output=gather).detach()

    return logits(model), logits(as_megatron_has_it(model))


@pytest.mark.parametrize("sp, gather", [(True, False), (True, True), (False, True)])
def test_without_labels_the_logits_are_real(
    pools: dict[int, RankPool], sp: bool, gather: bool
) -> None:
    for ours, theirs in pools[2].run(rank_logits, sp, gather):
        assert ours.shape == (3, CONFIG.model.seq_length, VOCAB if gather else VOCAB // 2)
        assert torch.equal(ours, theirs)


def rank_largest(group: Any, sp: bool) -> None:
    fused_layer._WINDOW = 10  # several windows, the last one short
    model, _ = build(group.size(), sp, tied=False)
    layer = model.output_layer
    hidden = torch.randn(12 // (group.size() if sp else 1), 3, CONFIG.model.hidden_size)
    logits, gathered = layer(hidden)[0], layer(hidden, runtime_gather_output=True)[0]
    assert gathered.shape[-1] == VOCAB
    layer.is_lazy = True
    lazy, _ = layer(hidden)
    value, place = (lazy * -2.0).max(dim=-1)
    torch.testing.assert_close(value, -2 * logits.min(-1).values)
    assert torch.equal(place, logits.argmin(-1))
    assert lazy.size(-1) == logits.shape[-1]
    lazy_gathered, _ = layer(hidden, runtime_gather_output=True)
    assert torch.equal(torch.argmax(lazy_gathered, dim=-1), gathered.argmax(-1))
    with pytest.raises(TypeError):
        torch.exp(lazy)
    with pytest.raises(AttributeError, match="a forward hook on the output layer"):
        lazy.float()


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

    gather.__module__ = release.__module__ = "megatron.core.distributed"
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
    single = ParallelConfig(tensor=1, sequence_parallel=False)
    untied = replace(CONFIG.model, tie_embeddings=False)
    config = replace(CONFIG, model=untied, parallel=single)
    other: Any = build_model(config, VOCAB, torch.device("cpu"))
    names = sorted(model.state_dict())
    with torch.no_grad():
        other.output_layer.weight.zero_()
    uniform = token_losses(other, *batch())
    torch.testing.assert_close(uniform, torch.full_like(uniform, VOCAB).log())
    assert not torch.allclose(uniform, token_losses(model, *batch()))
    assert names == sorted(as_megatron_has_it(model).state_dict())


def test_models_do_not_mix_and_parameter_names_stay(pools: dict[int, RankPool]) -> None:
    pools[1].run(rank_two_models)


def rank_mtp(group: Any, sp: bool) -> Any:
    model = build_with_mtp(sp, depths=2)
    return loss_and_gradients(model), loss_and_gradients(as_megatron_has_it(model))


@pytest.mark.parametrize("sp", [False, True])
def test_multi_token_prediction(pools: dict[int, RankPool], sp: bool) -> None:
    for ours, theirs in pools[2].run(rank_mtp, sp):
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
        assert any("mtp" in name for name in theirs[1])
        for name, gradient in theirs[1].items():
            assert gradient.norm() > 0, name
            assert relative_rms(ours[1][name], gradient) < 1e-5, name
