"""Where the plug-in meets the model: when logits are real, what it copies and keeps."""

import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megatron.core")

from flce_dist import linear_cross_entropy_with_metrics
from flce_dist.megatron import use_linear_cross_entropy
from flce_dist.megatron.fused_layer import LazyLogits
from flce_dist.testing import RankPool, relative_rms
from tests.contract.models import uneven
from tests.megatron_models import VOCAB, H, S, batch, inputs_of, megatron, token_losses
from tests.megatron_models import plugged as plugged_into

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def plugged(sp: bool = True, **options: Any) -> Any:
    return plugged_into(2, sp, **options)


# --- when logits are real


def rank_hooks(group: Any) -> None:
    """A hook on the gradient of logits is a reason, too; test_contract.py has forward hooks."""
    layer, hidden = plugged().output_layer, torch.randn(S // 2, 3, H)
    layer.is_lazy = True
    assert isinstance(layer(hidden)[0], LazyLogits)
    layer.register_full_backward_hook(lambda *given: None)
    assert isinstance(layer(hidden)[0], Tensor)


def test_under_a_backward_hook_logits_are_real(ranks: RankPool) -> None:
    ranks.run(rank_hooks)


def rank_real(group: Any) -> None:
    model = plugged()
    hidden = torch.randn(S // 2, 3, H)
    logits, bias = model.output_layer(hidden)
    assert type(logits) is Tensor and bias is None
    ours = model.compute_language_model_loss(batch()[1], logits.clone())
    theirs = type(model).compute_language_model_loss(model, batch()[1], logits)
    assert torch.equal(ours, theirs)
    # After an exception, too.
    with pytest.raises(Exception, match="labels"):
        token_losses(model, batch()[0], torch.full((3, S), VOCAB))
    assert type(model.output_layer(hidden)[0]) is Tensor
    model = plugged(label_smoothing=0.1)
    logits, _ = model.output_layer(hidden)
    with pytest.raises(NotImplementedError, match=r"does not apply label_smoothing=0\.1"):
        model.compute_language_model_loss(batch()[1], logits)


def test_outside_the_models_loss_logits_are_real(ranks: RankPool) -> None:
    ranks.run(rank_real)


def rank_mtp_step(group: Any) -> None:
    """What 0.18 and later do in ``compute_mtp_single_step``."""
    model = plugged(sp=False, tied=True, mtp=1)
    weight = model.shared_embedding_or_output_weight()
    hidden = torch.randn(4, 1, H)
    with torch.inference_mode():
        logits, _ = model.output_layer(hidden, weight=weight, runtime_gather_output=True)
    assert type(logits) is Tensor and logits.shape == (4, 1, VOCAB)


def test_a_single_step_of_multi_token_prediction(ranks: RankPool) -> None:
    ranks.run(rank_mtp_step)


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


def rank_tail(group: Any) -> None:
    model = tail_of(plugged())
    hidden = torch.randn(S // 2, 3, H, requires_grad=True)
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
    assert isinstance(model.seen, LazyLogits) and model.seen.scale == 0.5
    theirs = results(tail_of(megatron(2, True, False)))
    for mine, other in zip(ours, theirs, strict=True):
        assert relative_rms(mine, other) < 1e-5


def test_a_scale_after_a_softcap_is_refused() -> None:
    """The loss would be of softcap(scale * z), where the model's logits are scale * softcap(z)."""
    logits = LazyLogits(mock.Mock(loss_keywords={"softcap": 5.0}), torch.zeros(1), None, None)
    with pytest.raises(NotImplementedError, match=r"softcap=5.0 and a factor of 0.5"):
        logits * 0.5


def test_a_scale_of_the_model_and_an_output_processor(ranks: RankPool) -> None:
    ranks.run(rank_tail)


# --- what is kept and copied


def rank_metrics(group: Any, sp: bool) -> None:
    model = plugged(sp, metrics=True)
    layer = model.output_layer
    hidden: list[Tensor] = []

    def catch(layer: Any, args: Any, kwargs: Any) -> None:
        hidden.append(args[0] if args else kwargs["input_"])

    layer.register_forward_pre_hook(catch, with_kwargs=True)
    tokens, labels = batch()
    loss = token_losses(model, tokens, labels)
    expected = linear_cross_entropy_with_metrics(
        hidden[0], layer.weight, labels.T, reduction="none", tp_group=group, sequence_parallel=sp
    )
    assert not any(kept.requires_grad for kept in layer.last_metrics)
    assert torch.equal(layer.last_metrics.loss, loss)
    for kept, metric in zip(layer.last_metrics, expected, strict=True):
        assert torch.equal(kept, metric.T)
    with torch.no_grad():
        logits = model(*inputs_of(tokens), runtime_gather_output=True)
    assert torch.equal(layer.last_metrics.correct, logits.argmax(-1) == labels)
    assert plugged().output_layer.last_metrics is None


@pytest.mark.parametrize("sp", [False, True])
def test_metrics_come_from_the_same_pass(ranks: RankPool, sp: bool) -> None:
    ranks.run(rank_metrics, sp)


def rank_identity(group: Any) -> None:
    """test_contract.py compares state dicts and checkpoints."""
    model = plugged()
    ours = type(model.output_layer)
    assert pickle.loads(pickle.dumps(ours)) is ours
    theirs = megatron(2, True, False)
    assert type(theirs.output_layer).__name__ == ours.__name__
    early = nn.Module()
    early.post_process = False  # type: ignore[assignment]
    stages = [early, theirs]
    assert use_linear_cross_entropy(stages, softcap=5.0) is stages
    assert theirs.output_layer.loss_keywords["softcap"] == 5.0


def test_names_stay(ranks: RankPool) -> None:
    ranks.run(rank_identity)
