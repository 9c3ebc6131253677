"""The plug-in for transformers in one process: equal to the model's own step, or refused."""

import copy
import inspect
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from flce_dist import linear_cross_entropy
from flce_dist.hf import restore, use_linear_cross_entropy
from flce_dist.hf.lazy_logits import LazyLogits
from tests.contract.compare import compare
from tests.hf_models import KINDS, VOCAB, B, S, batch, ours, step, theirs

BUDGET = 1e-5  # fp32


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_equals_the_models_own(kind):
    model = theirs(kind)
    plugged = ours(model)
    shifted = torch.randint(VOCAB, (B, S), generator=torch.Generator().manual_seed(2))
    own = {"ignore_index": 8, "labels": batch()["labels"].clamp(min=8), "num_items_in_batch": 5}
    settings: Any = {}, {"num_items_in_batch": torch.tensor(7)}, {"shift_labels": shifted}, own
    for given in settings:
        compare(step(plugged, **given), step(model, **given), BUDGET)
    logits = plugged(**batch()).logits
    assert isinstance(logits, LazyLogits) and logits.shape == (B, S, VOCAB)
    assert torch.equal(logits, model(**batch()).logits)


def test_positional_labels_and_tuples():
    model = theirs("gemma2, softcap")
    plugged = ours(model)
    assert inspect.signature(plugged.forward) == inspect.signature(model.forward)
    names = list(inspect.signature(model.forward).parameters)
    values = [batch().get(name) for name in names[: names.index("labels") + 1]]
    loss, logits, *_ = plugged(*values, return_dict=False)
    assert isinstance(logits, LazyLogits)
    torch.testing.assert_close(loss, model(**batch()).loss)


def test_logits_without_labels_and_generate():
    model = theirs().eval()
    plugged = ours(model)
    ids = batch()["input_ids"]
    found = plugged(input_ids=ids).logits
    assert type(found) is Tensor and torch.equal(found, model(input_ids=ids).logits)
    given: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(plugged.generate(ids, **given), model.generate(ids, **given))
    given = {"max_new_tokens": 4, "num_beams": 2, "do_sample": False}
    assert torch.equal(plugged.generate(ids, **given), model.generate(ids, **given))


def test_logits_in_the_output_are_computed_when_they_are_used():
    plugged = ours(theirs("gemma2, softcap"))
    layer = plugged.lm_head
    with mock.patch.object(
        nn.Linear, "forward", autospec=True, side_effect=nn.Linear.forward
    ) as of:
        out = plugged(**batch())
        out.loss.backward()
        logits = out.logits.float()  # as accelerate does
        assert (logits.dtype, logits.device.type, logits.ndim) == (torch.float32, "cpu", 3)
        assert not any(call.args[0] is layer for call in of.call_args_list)
        argmax = logits[:, -1].argmax(-1)
        assert sum(call.args[0] is layer for call in of.call_args_list) == 1
    assert argmax.shape == (B,)
    with torch.no_grad():
        out = plugged(**batch())
        assert not out.logits.exp().requires_grad
    assert out.logits.exp().requires_grad  # not what was computed without
    with torch.autocast("cpu", torch.bfloat16):
        assert plugged(**batch()).logits.dtype == torch.bfloat16


class Unknown:
    """Kinds of forward that do something to logits before the loss."""

    powers = staticmethod(lambda logits: torch.nn.functional.softplus(logits))
    scaled = staticmethod(lambda logits: logits * torch.tensor(0.5))
    negative = staticmethod(lambda logits: logits * -0.5)
    twice = staticmethod(lambda logits: torch.tanh(torch.tanh(logits)))

    @staticmethod
    def written(logits: Any) -> Any:
        logits[..., :3] = -50.0
        return logits

    @staticmethod
    def known(logits: Any) -> Any:
        return 2.0 * (nn.functional.tanh(logits.float() * 0.5) / 0.25)


@pytest.mark.parametrize("name", ["powers", "scaled", "negative", "twice", "written", "known"])
def test_whatever_is_done_to_the_logits_is_in_the_loss(name):
    change = getattr(Unknown, name)
    model = theirs()

    class Changed(type(model)):  # type: ignore[misc]
        def forward(self, input_ids, labels=None):
            hidden = self.model(input_ids=input_ids).last_hidden_state
            logits = change(self.lm_head(hidden))
            loss = self.loss_function(logits, labels, VOCAB)
            return type("Out", (dict,), {"loss": loss})(loss=loss, logits=logits)

    model.__class__ = Changed
    plugged = ours(model)
    compare(step(plugged, may_warn=name != "known"), step(model), BUDGET)
    if name != "known":
        with pytest.warns(UserWarning, match="the model asks for .* of its logits"):
            plugged(**batch())
        with pytest.raises(NotImplementedError, match=r"does not apply z_loss_weight=0\.1"):
            step(ours(model, z_loss_weight=0.1), may_warn=True)


@pytest.mark.parametrize("name", ["reduction", "ignore_index", "weight", "label_smoothing"])
def test_a_cross_entropy_of_the_models_own_code(name):
    """With what ours does not have, it is that of real logits."""
    values = {"reduction": "sum", "ignore_index": 8, "weight": torch.rand(VOCAB)}
    given: Any = {name: values.get(name, 0.1)}
    model = theirs()

    class Changed(type(model)):  # type: ignore[misc]
        def forward(self, input_ids, labels=None):
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state).float()
            flat = logits.view(-1, VOCAB), labels.clamp(min=0).view(-1)
            loss = nn.functional.cross_entropy(*flat, **given)
            return type("Out", (dict,), {"loss": loss})(loss=loss, logits=logits)

    model.__class__ = Changed
    is_real = name in ("weight", "label_smoothing")
    compare(step(ours(model), may_warn=is_real), step(model), BUDGET)
    if is_real:
        with pytest.warns(UserWarning, match="the model asks for cross_entropy of its logits"):
            ours(model)(**batch())


def test_a_cross_entropy_of_the_output_is_of_real_logits():
    """A caller's own loss has none of the options."""
    model, labels = theirs(), batch()["labels"].view(-1)
    outputs = (one(**batch()) for one in (ours(model, z_loss_weight=1.0), model))
    flat = (out.logits.view(-1, VOCAB) for out in outputs)
    found, expected = (nn.functional.cross_entropy(x, labels) for x in flat)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("register", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_of_the_layer_see_logits(register):
    model = theirs()
    plugged, seen = ours(model), []
    getattr(plugged.lm_head, f"register_{register}")(lambda *given: seen.append(given[1:]))
    with pytest.warns(UserWarning, match="a hook of the output layer"):
        compare(step(plugged, may_warn=True), step(model), BUDGET)
    assert len(seen) >= 1


def test_options_reach_the_loss():
    model = theirs("gemma2, softcap")
    hidden = model.model(input_ids=batch()["input_ids"]).last_hidden_state
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss_weight": 0.01}
    plugged = ours(model, schedule="recompute", **options)
    labels = nn.functional.pad(batch()["labels"], (0, 1), value=-100)[:, 1:]
    expected = linear_cross_entropy(hidden, model.lm_head.weight, labels, softcap=0.7, **options)
    torch.testing.assert_close(plugged(**batch()).loss, expected)
    use_linear_cross_entropy(plugged)  # other options
    torch.testing.assert_close(plugged(**batch()).loss, model(**batch()).loss)


def test_copies_and_restoring():
    model = theirs("cohere, product")
    plugged = ours(model)
    expected = step(model)
    compare(step(copy.deepcopy(plugged)), expected, BUDGET)
    assert type(plugged).__name__ == type(model).__name__ and isinstance(plugged, type(model))
    assert plugged.state_dict().keys() == model.state_dict().keys()
    assert restore(plugged) is plugged and restore(model) is model
    assert type(plugged) is type(model) and type(plugged.lm_head) is nn.Linear
    compare(step(pickle.loads(pickle.dumps(plugged))), expected, 0.0)
    replica = ours(model)._replicate_for_data_parallel()
    with pytest.warns(UserWarning, match="DataParallel gathers them"):
        assert type(replica(**batch()).logits) is Tensor


def test_refusals():
    model = theirs()

    def complaint(error: type[Exception], change: Any, **options: Any) -> str:
        one = copy.deepcopy(model)
        with pytest.raises(error) as found:
            use_linear_cross_entropy(change(one) or one, **options)
        assert type(one) is type(model)
        return str(found.value)

    class Quantized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    def layer(one: Any) -> None:
        one.lm_head = Quantized(32, VOCAB)

    def own_forward(one: Any) -> None:
        one.forward = one.forward

    def own_loss(one: Any) -> None:
        one.loss_function = lambda logits, labels, vocab_size: logits.sum()

    text = complaint(NotImplementedError, layer)
    assert "must be an nn.Linear, or LoRA on one, got Quantized" in text
    assert "forward must be that of the class" in complaint(NotImplementedError, own_forward)
    assert "loss_function must be ForCausalLMLoss" in complaint(NotImplementedError, own_loss)
    wrapped = complaint(NotImplementedError, nn.Sequential)
    assert "must be a PreTrainedModel or PeftModel, got Sequential" in wrapped
    assert "LoRA on one, got None" in complaint(NotImplementedError, lambda one: one.model)
    for name in ("softcap", "reduction", "logit_scale", "tp_group"):
        assert name in complaint(TypeError, lambda one: None, **{name: None})

    plugged = ours(model)
    plugged.lm_head = nn.Linear(32, VOCAB)
    with pytest.raises(RuntimeError, match="got another Linear; call it again"):
        plugged(**batch())


def test_compile():
    model = theirs("gemma2, softcap")
    plugged = ours(model)
    torch._dynamo.reset()
    compiled = torch.compile(plugged, backend="aot_eager", fullgraph=True)
    found = compiled(**batch())
    found.loss.backward()
    expected = step(model)
    gradients = {name: p.grad for name, p in plugged.named_parameters()}
    compare(gradients | {"loss": found.loss.detach()}, expected, BUDGET)
    logits = compiled(**batch()).logits
    assert isinstance(logits, LazyLogits)
    assert torch.equal(logits.argmax(-1), model(**batch()).logits.argmax(-1))
    torch.testing.assert_close(compiled(**batch()).loss, expected["loss"])
