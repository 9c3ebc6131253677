"""The plug-in on forked gloo ranks, beside what it shares with Megatron (test_contract.py)."""

import pickle
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("megatron.core")

from flce_dist import filtered, linear_cross_entropy
from flce_dist.megatron import best_ids, divergence, scores, use_linear_cross_entropy
from flce_dist.megatron.layouts import check_tokens
from flce_dist.megatron.symbolic import HeadCall, SymbolicHead
from flce_dist.testing import relative_rms, run_ranks
from tests.contract.models import B, uneven
from tests.megatron_models import VOCAB, H, S, batch, inputs_of, megatron, plugged, token_losses
from tests.on_ranks import on_ranks
from tests.parallel_problem import complaint


def symbolic(layer: Any) -> Any:
    """The logits of a layer as a model's forward has them with labels."""
    logits, bias = SymbolicHead(layer, layer, returns_bias=True)(torch.randn(S, B, H))
    assert bias is None
    return logits


@pytest.mark.parametrize("tp, sp", [(1, False), (2, False), (2, True)])
@on_ranks("tp")
def test_predictions_that_multi_token_prediction_counts(group, tp, sp):
    """As Megatron finds them in logits, of this rank or gathered; -1 for another than the label."""
    layer = plugged(tp, sp, mtp=1).output_layer
    hidden = torch.randn(S // (tp if sp else 1), B, H)
    gathered, _ = layer(hidden, runtime_gather_output=True)
    best = (-2.0 * gathered).argmax(-1)
    labels = best.where(torch.arange(S)[:, None] % 3 != 0, (best + 1) % VOCAB)
    head = SymbolicHead(layer, layer, returns_bias=True)
    logits = head(hidden)[0] * -2.0
    with pytest.raises(AttributeError, match="no 'argmax'; a forward hook on"):
        torch.argmax(logits, dim=-1)
    logits.loss(labels.T)
    expected = labels.where(labels == best, -1)
    assert 0 < (expected < 0).sum() < S * B
    assert torch.equal(torch.argmax(logits, dim=-1), expected)
    value, row = logits.max(dim=-1)
    values, rows = gather(value, group), gather(row, group)
    winner = values.argmax(0)
    found = winner * logits.size(-1) + rows.gather(0, winner[None])[0]
    assert torch.equal(found, expected)


def gather(x: Tensor, group: Any) -> Tensor:
    """[P, ...] of all ranks."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x, group=group)
    return torch.stack(parts)


@on_ranks(1)
def test_what_logits_are_inside_a_forward(group):
    layer = plugged(1, sp=False).output_layer
    logits = symbolic(layer)
    assert logits.size(-1) == VOCAB and not isinstance(logits, Tensor)
    with pytest.raises(TypeError):
        torch.exp(logits)
    with pytest.raises(TypeError):
        logits * torch.ones(1)
    for name in ("float", "transpose", "contiguous"):
        with pytest.raises(AttributeError, match=f"no '{name}'; a forward hook on model.output_"):
            getattr(logits, name)()
    head: Any = SymbolicHead(layer, layer, returns_bias=True)
    assert head.weight is layer.weight
    with pytest.raises(AttributeError):
        head.sequence_parallel = True


@on_ranks(2)
def test_outside_the_models_loss_logits_are_real(group):
    model, hidden = plugged(2, sp=True), torch.randn(S // 2, B, H)
    layer = model.output_layer
    # After an exception, too.
    with pytest.raises(Exception, match="labels"):
        token_losses(model, batch()[0], torch.full((B, S), VOCAB))
    logits, bias = layer(hidden)
    assert type(logits) is Tensor and bias is None
    layer.loss_keywords["label_smoothing"] = 0.1
    with pytest.raises(NotImplementedError, match=r"does not apply label_smoothing=0\.1"):
        model.compute_language_model_loss(batch()[1], logits)


def tail_of(model: Any) -> Any:
    """A model that is the end of ``GPTModel.forward`` as 0.19 has it."""
    from megatron.core.models.gpt import GPTModel

    class Tail(GPTModel):
        multiplier = 0.5
        seen: Any = None

        def forward(self, hidden: Tensor, labels: Any = None, *, output_processor: Any = None):
            if output_processor is not None:
                return output_processor(
                    hidden_states=hidden,
                    output_layer=self.output_layer,
                    labels=labels,
                    compute_language_model_loss=self.compute_language_model_loss,
                )
            logits, _ = self.output_layer(hidden, weight=None)
            logits = logits * self.multiplier
            self.seen = logits
            if labels is None:
                return logits.transpose(0, 1).contiguous()
            return self.compute_language_model_loss(labels, logits)

    model.__class__ = Tail
    return model


@on_ranks(2)
def test_a_scale_of_the_model_and_an_output_processor(group):
    model = tail_of(plugged(2, sp=True))
    hidden = torch.randn(S // 2, B, H, requires_grad=True)
    labels = batch()[1]

    def processor(output_layer: Any, hidden_states: Tensor, labels: Tensor, **given: Any) -> Any:
        logits, _ = output_layer(hidden_states)
        assert type(logits) is Tensor
        return given["compute_language_model_loss"](labels, logits * model.multiplier)

    def results(model: Any) -> list[Tensor]:
        found = [model(hidden, output_processor=processor, labels=labels), model(hidden)]
        for loss in (model(hidden, labels), model(hidden, labels=labels)):
            found += [loss, *torch.autograd.grad(uneven(loss), (hidden, model.output_layer.weight))]
        return found

    ours = results(model)
    assert isinstance(model.seen, HeadCall)
    with pytest.raises(RuntimeError, match="for a forward that has ended"):
        model.seen.loss(labels)
    theirs = results(tail_of(megatron(2, True, False)))
    for mine, other in zip(ours, theirs, strict=True):
        assert relative_rms(mine, other) < 1e-5


@on_ranks(1)
def test_no_metrics_of_an_earlier_loss_stay_behind_an_output_processor(group):
    """Which may compute a loss of its own."""
    model = tail_of(plugged(1, sp=False, metrics=True))
    hidden = torch.randn(S, B, H)
    labels = batch()[1]
    model(hidden, labels)
    assert model.output_layer.last_metrics is not None
    model(hidden, labels, output_processor=lambda **given: torch.zeros(B, S))
    assert model.output_layer.last_metrics is None


def test_a_scale_after_a_softcap_is_refused():
    """The loss would be of softcap(scale * z), where the model's logits are scale * softcap(z)."""
    layer = mock.Mock(loss_keywords={"softcap": 5.0})
    logits = HeadCall(SymbolicHead(layer, layer, returns_bias=True), (), {})
    with pytest.raises(NotImplementedError, match=r"softcap=5.0 and a factor of 0.5"):
        logits * 0.5


@on_ranks(2)
def test_padding_of_the_vocabulary_takes_no_part(group):
    # 95 entries on two ranks: 48 rows each, the last one is padding.
    model = plugged(2, sp=True, vocab_size=VOCAB - 1)
    tokens, labels = (ids.clamp(max=VOCAB - 2) for ids in batch())
    before = token_losses(model, tokens, labels)
    with torch.no_grad():
        model.output_layer.weight[VOCAB // 2 - 1 if group.rank() == 1 else VOCAB :] = 1e4
    assert torch.equal(token_losses(model, tokens, labels), before)


@on_ranks(1)
def test_models_do_not_mix_and_keep_their_metrics(group):
    stage, other, plain = nn.Module(), megatron(1, False, False), megatron(1, False, False)
    stage.post_process = False  # type: ignore[assignment]
    stages = [stage, other]
    assert use_linear_cross_entropy(stages, logit_scale=0.5) is stages
    assert other.output_layer.loss_keywords["logit_scale"] == 0.5
    with torch.no_grad():
        other.output_layer.weight.zero_()
    model = plugged(1, sp=False, metrics=True)
    loss, uniform = token_losses(model, *batch()), token_losses(other, *batch())
    torch.testing.assert_close(uniform, torch.full_like(uniform, VOCAB).log())
    torch.testing.assert_close(loss, token_losses(plain, *batch()))
    tokens, labels = batch()
    assert torch.equal(loss, model(*inputs_of(tokens), None, labels))  # by position

    kept = model.output_layer.last_metrics
    assert torch.equal(kept.loss, loss) and torch.equal(kept.logprob, -loss)
    assert not any(metric.requires_grad for metric in kept)
    assert other.output_layer.last_metrics is None
    ours = type(model.output_layer)
    assert pickle.loads(pickle.dumps(ours)) is ours
    assert ours.__name__ == type(plain.output_layer).__name__


@on_ranks(1)
def test_a_second_call_changes_options(group):
    """Those of the last call hold; hooks are registered once."""
    model = plugged(1, sp=False, label_smoothing=0.1, metrics=True)
    smoothed = token_losses(model, *batch())
    assert model.output_layer.last_metrics is not None
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
    assert use_linear_cross_entropy(model, z_loss_weight=0.5) is model
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
    expected = token_losses(plugged(1, sp=False, z_loss_weight=0.5), *batch())
    loss = token_losses(model, *batch())
    assert torch.equal(loss, expected) and not torch.allclose(loss, smoothed)
    assert model.output_layer.last_metrics is None
    other = megatron(1, False, False)
    other.output_layer = model.output_layer
    with pytest.raises(ValueError, match="must have no plug-in of another model"):
        use_linear_cross_entropy(other)


@on_ranks(1)
def test_flags_are_flags(group):
    model = plugged(1, sp=False)
    args = inputs_of(batch()[0])
    found = complaint(use_linear_cross_entropy, model, metrics=None)
    assert found == "metrics must be a bool, got None"
    found = complaint(divergence, model, model, *args, with_metrics=torch.ones(2))
    assert found == (
        "with_metrics must be a bool, got a tensor of shape (2,) and dtype torch.float32"
    )


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


@on_ranks(2)
def test_the_layer_of_the_development_branch(group):
    """Its layer is a subclass that can return a loss itself."""
    LinearCrossEntropyModule = development_layer()
    model = megatron(2, sp=True, tied=False)
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


@pytest.mark.parametrize("tp, sp", [(1, False), (2, True)])
@on_ranks("tp")
def test_ignored_labels_that_are_not_computed(group, tp, sp):
    plugged(tp, sp)  # a batch is that of a rank of its groups
    tokens, labels = batch()
    labels = labels.masked_fill(torch.arange(labels.numel()).view_as(labels) % 3 != 0, -100)
    found = []
    most = int((labels >= 0).sum())
    for options in ({}, {"max_counted": most}, {"skip_ignored": True, "impl": "triton"}):
        model = plugged(tp, sp, **options)
        loss = token_losses(model, tokens, labels)
        loss.sum().backward()
        found.append([loss, *(x.grad for x in model.parameters())])
    for of_all, bounded, skipping in zip(*found, strict=True):
        torch.testing.assert_close(bounded, of_all)
        torch.testing.assert_close(skipping, of_all)


SEQUENCES, TILE_T, TILE_V, WIDTH = 4, 128, 256, 16


@pytest.mark.parametrize("tp, sp", [(1, False), (2, False), (2, True)])
@on_ranks("tp")
def test_blocks_are_of_one_sequence(group, tp, sp):
    """Of filtered gradients; sequence i is about the rows of tile i."""
    generator = torch.Generator().manual_seed(0)
    s = TILE_T * (tp if sp else 1)
    own = 5.0 * torch.eye(SEQUENCES, WIDTH)
    hidden = own.expand(s, -1, -1) + 0.1 * torch.randn(s, SEQUENCES, WIDTH, generator=generator)
    weight = own.repeat_interleave(TILE_V, 0)
    labels = torch.randint(TILE_V, (s, SEQUENCES), generator=generator)
    labels += TILE_V * torch.arange(SEQUENCES)

    layer = plugged(tp, sp, schedule=filtered.schedule(2.0**-10), metrics=True).output_layer
    mine = hidden.chunk(tp)[group.rank()] if sp else hidden
    loss, _ = layer.token_loss(mine, weight.chunk(tp)[group.rank()], labels.T)
    logits = (hidden @ weight.T).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="none")
    torch.testing.assert_close(loss.T.flatten(), expected)
    # In the order [s, b] every block would hold tokens of all sequences, and keep all tiles.
    assert layer.last_metrics.kept_share == 1 / SEQUENCES


OF_THIS_RANK = ": pass those of whole sequences, since hidden states alone are split"
WRONG_TOKENS = [
    ((S, B), ": pass {}.transpose(0, 1)"),
    ((B, S // 2), OF_THIS_RANK),
    ((B * S,), f": pass {{}}.reshape({(B, S)})"),
    ((B, S, 1), f": pass {{}}.reshape({(B, S)})"),
    ((B * S + 1,), ""),
]
WRONG_IDS = [
    ((B, S), ": pass ids[..., None]"),
    ((S, B), ": pass ids.transpose(0, 1)[..., None]"),
    ((S, B, 3), ": pass ids.transpose(0, 1)"),
    ((B, S // 2, 3), OF_THIS_RANK),
    ((B * S,), f": pass ids.reshape({(B, S, 1)})"),
    ((B * S, 3), f": pass ids.reshape({(B, S, 3)})"),
    ((B, S, 3, 2), ""),
]


@pytest.mark.parametrize(("shape", "way_out"), WRONG_TOKENS)
@on_ranks(2)
def test_tokens_of_another_shape_are_named_as_the_model_has_them(group, shape, way_out):
    model = plugged(2, sp=True)
    args = inputs_of(batch()[0])
    bad = torch.zeros(shape, dtype=torch.long)
    start = f" must be [b, s] = {(B, S)}, as the model's tokens, got {shape}"
    message = start + way_out.replace("{}", "labels")
    with torch.no_grad():
        assert complaint(model, *args, labels=bad) == f"labels{message}"
        assert complaint(best_ids, model, *args, labels=bad) == f"labels{message}"
        said = complaint(divergence, model, model, *args, token_weight=bad.float())
        assert said == "token_weight" + message.replace("labels", "token_weight")


@pytest.mark.parametrize(("shape", "way_out"), WRONG_IDS)
@on_ranks(2)
def test_ids_of_another_shape_are_named_as_the_model_has_them(group, shape, way_out):
    model = plugged(2, sp=True)
    ids = torch.zeros(shape, dtype=torch.long)
    start = f"ids must be [b, s, K] = ({B}, {S}, K), as the model's tokens, got {shape}"
    assert complaint(scores, model, ids, *inputs_of(batch()[0])) == start + way_out


@pytest.mark.parametrize("options", [{}, {"metrics": True}, {"schedule": filtered.schedule(1e-3)}])
@on_ranks(1)
def test_tokens_that_are_no_dense_tensor_are_refused_by_name(group, options):
    model = plugged(1, sp=False, **options)
    tokens, labels = batch()
    args = inputs_of(tokens)
    for bad in (labels.tolist(), labels.to_sparse(), torch.nested.nested_tensor([labels, labels])):
        assert complaint(model, *args, labels=bad).startswith("labels must be a ")
    bad = torch.ones(B, S).to_sparse()
    with torch.no_grad():
        said = complaint(best_ids, model, *args, k=1, temperature=bad)
    assert said == "temperature must be a dense tensor (torch.strided), got torch.sparse_coo"


@on_ranks(1)
def test_what_is_no_model_with_an_output_layer(group):
    model = megatron(1, False, False)
    for part in (model.output_layer, model.decoder):
        assert complaint(use_linear_cross_entropy, part) == (
            f"model must have an output_layer, got a {type(part).__name__} without one: pass the "
            "model that it is a part of, such as a GPTModel"
        )
    del model.output_layer
    assert complaint(use_linear_cross_entropy, model) == (
        "model must have an output_layer, got a GPTModel without one: pipeline stages without one "
        "have post_process=False"
    )
    of_transformers = type("LlamaForCausalLM", (nn.Module,), {"__module__": "transformers.models"})
    assert complaint(use_linear_cross_entropy, of_transformers()) == (
        "model must have an output_layer, got a LlamaForCausalLM without one: for a model of "
        "transformers there is flce_dist.hf"
    )
    assert complaint(use_linear_cross_entropy, "name") == (
        "model must have an output_layer, got a str without one"
    )


@on_ranks(1)
def test_a_model_without_the_plug_in_is_named(group):
    plain = megatron(1, False, False)
    model = plugged(1, sp=False)
    tokens, labels = batch()
    args = inputs_of(tokens)
    message = (
        "{0} must be one that use_linear_cross_entropy was called with, got a GPTModel without: "
        "call use_linear_cross_entropy({0}) before it is wrapped"
    )
    with torch.no_grad():
        assert complaint(scores, plain, labels[..., None], *args) == message.format("model")
        assert complaint(best_ids, plain, *args, k=2) == message.format("model")
        assert complaint(divergence, plain, model, *args) == message.format("model")
        assert complaint(divergence, model, plain, *args) == message.format("teacher")


def test_other_ranks_learn_that_one_has_tokens_of_another_shape(ranks_compared):
    def rank(group: Any) -> str:
        hidden = torch.zeros(S // 2, B, H)
        if group.rank() == 1:
            options = {"tp_group": group, "sequence_parallel": True}
            labels = torch.zeros(S, B).long()
            return complaint(linear_cross_entropy, hidden, torch.zeros(5, H), labels, **options)
        layer = SimpleNamespace(tp_group=group, sequence_parallel=True)
        bad = torch.zeros(S, B).long()
        return complaint(check_tokens, layer, "linear_cross_entropy", hidden, labels=bad)

    own, others = run_ranks(rank, 2)
    assert own.startswith("labels must be [b, s] = (2, 16)")
    assert f"rank 0 raised ValueError: {own}" in others
