"""What sits on an output layer, or keeps its logits: the layer is called once, with all of it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

from flce_dist.hf import NO_LOGITS
from tests.contract.compare import compare
from tests.garbage import tensors_in_cycles
from tests.hf_models import VOCAB, B, S, batch, ours, real_logits, step, theirs

BUDGET = 1e-5  # fp32
LOGITS = (B, S, VOCAB)


@pytest.mark.parametrize("given", [{}, {"logits": True}], ids=str)
def test_a_pre_hook_acts_once_and_needs_no_logits(given):
    model = theirs()
    plugged = ours(model)
    seen = []

    def larger(layer: Any, args: Any) -> Any:
        seen.append(layer)
        return (args[0] * 1.5,)

    for one in (plugged, model):
        one.lm_head.register_forward_pre_hook(larger)
    with real_logits() as made:
        found = step(plugged, **given)
    assert seen == [plugged.lm_head] and made == [LOGITS] * len(given)
    compare(found, step(model), BUDGET)


@pytest.mark.parametrize("register", ["forward_hook", "full_backward_hook"])
def test_hooks_of_the_layer_see_logits(register):
    model = theirs()
    plugged, seen = ours(model), []
    getattr(plugged.lm_head, f"register_{register}")(lambda *given: seen.append(given[2]))
    with pytest.warns(UserWarning, match="a hook of the output layer"), real_logits() as made:
        found = step(plugged, may_warn=True)
    compare(found, step(model), BUDGET)
    assert made == [LOGITS] and len(seen) == 1
    first = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert type(first) is Tensor and first.shape == LOGITS
    step(plugged)  # the warning comes once


def test_a_hook_may_change_logits():
    model = theirs()
    plugged = ours(model)
    for one in (plugged, model):
        one.lm_head.register_forward_hook(lambda layer, args, logits: logits.clamp(max=1.0))
    compare(step(plugged, may_warn=True), step(model), BUDGET)


def test_hooks_of_all_modules_see_logits():
    model = theirs()
    plugged, seen = ours(model), []
    note = nn.modules.module.register_module_forward_hook
    handle = note(lambda layer, args, result: seen.append(result) if args else None)
    try:
        with pytest.warns(UserWarning, match="a hook of all modules"):
            found = step(plugged, may_warn=True)
    finally:
        handle.remove()
    compare(found, step(model), BUDGET)
    assert [type(x) for x in seen if getattr(x, "shape", None) == LOGITS] == [Tensor]
    with real_logits() as made:
        step(plugged)
    assert made == []


def test_counting_flops_needs_no_logits():
    """Its hooks of all modules note which module runs."""
    plugged = ours(theirs())
    with FlopCounterMode(display=False) as counter, real_logits() as made:
        step(plugged)
    assert made == [] and "LlamaForCausalLM" in counter.flop_counts
    assert not vars(plugged)["linear_cross_entropy"].warned


def test_hooks_around_the_layer_see_logits():
    model = theirs("bert, head with layers")
    plugged, seen = ours(model), []
    plugged.cls.register_forward_hook(lambda layer, args, logits: seen.append(logits))
    with pytest.warns(UserWarning, match="a hook of BertOnlyMLMHead, around the output layer"):
        found = step(plugged, may_warn=True)
    compare(found, step(model), BUDGET)
    assert [type(x) for x in seen] == [Tensor]


def test_a_forward_of_the_layers_own():
    model = theirs()
    plugged = ours(model)
    for one in (plugged, model):
        one.lm_head.forward = lambda x, own=one.lm_head.forward: 0.5 * own(x)
    with pytest.warns(UserWarning, match="or a forward of its own"):
        compare(step(plugged, may_warn=True), step(model), BUDGET)


def test_hooks_of_the_model_see_no_tensor_of_ours():
    plugged = ours(theirs())
    seen: list[Any] = []
    plugged.register_forward_hook(lambda model, args, out: seen.append(out.logits))
    step(plugged)
    assert seen == [NO_LOGITS]


def with_forward(forward: Any) -> tuple[Any, Any]:
    """A model with this forward, and its copy with the plug-in."""
    model = theirs()
    body = type("Changed", (type(model),), {"forward": forward, "__module__": __name__})
    model.__class__ = body
    return model, ours(model)


class Out(dict):
    """The output of a model: items, and its loss as an attribute."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.loss = items["loss"]


def hidden_of(model: Any, input_ids: Tensor) -> Tensor:
    return model.model(input_ids=input_ids).last_hidden_state


def test_logits_that_are_used_after_the_loss():
    """The layer is still called once, with its hooks."""
    seen: list[Any] = []

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(hidden_of(self, input_ids))
        loss = self.loss_function(logits, labels, VOCAB)
        return Out(loss=loss + 0.1 * logits.exp().mean(), right=logits.argmax(-1), logits=logits)

    model, plugged = with_forward(forward)

    def larger(layer: Any, args: Any) -> Any:
        seen.append(layer)
        return (args[0] * 1.5,)

    for one in (plugged, model):
        one.lm_head.register_forward_pre_hook(larger)
    with pytest.warns(UserWarning, match="the model asks for exp"), real_logits() as made:
        found = step(plugged, may_warn=True)
    assert len(seen) == 1 and made == [LOGITS]
    compare(found, step(model), BUDGET)
    out, expected = plugged(**batch()), model(**batch())
    assert torch.equal(out["right"], expected["right"])
    assert torch.equal(out["logits"], expected["logits"])


def test_logits_that_no_loss_takes():
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(hidden_of(self, input_ids)) * 2.0
        return Out(loss=self.lm_head.weight.sum(), logits=logits)

    model, plugged = with_forward(forward)
    with pytest.warns(UserWarning, match="no loss of the model took them"):
        found = plugged(**batch())["logits"]
    assert type(found) is Tensor and torch.equal(found, model(**batch())["logits"])


def test_logits_written_after_steps_were_taken():
    """A step that was noted is of the values as they were, a view of them as they are."""

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(hidden_of(self, input_ids))
        doubled, flat = logits * 2.0, logits.view(-1, VOCAB)
        logits[..., :5] = -3.0
        loss = nn.functional.cross_entropy(flat + 0.5 * doubled.view(-1, VOCAB), labels.view(-1))
        return Out(loss=loss, logits=logits)

    model, plugged = with_forward(forward)
    compare(step(plugged, may_warn=True), step(model), BUDGET)


def test_two_losses_of_the_same_logits():
    calls: list[Any] = []

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(hidden_of(self, input_ids))
        flat = logits[:, :-1].contiguous().reshape(-1, VOCAB), labels[:, 1:].reshape(-1)
        last = logits[:, -3:, :].flatten(0, 1), input_ids[:, -3:].flatten()
        loss = nn.functional.cross_entropy(*flat) + nn.functional.cross_entropy(*last)
        return Out(loss=loss, logits={"of": [logits]})

    model, plugged = with_forward(forward)
    plugged.lm_head.register_forward_pre_hook(lambda layer, args: calls.append(layer))
    with real_logits() as made:
        compare(step(plugged), found := step(model), BUDGET)
        assert made == [LOGITS] and len(calls) == 1  # of the model without the plug-in
    assert plugged(**batch())["logits"] == {"of": [NO_LOGITS]}
    asked = plugged(**batch(), logits=True)
    assert torch.equal(asked["logits"]["of"][0], model(**batch())["logits"]["of"][0])
    torch.testing.assert_close(asked.loss.detach(), found["loss"])


class Doubled(torch.autograd.Function):
    """A function that autograd knows, and __torch_function__ does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2.0


class Same(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


class InPlace(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2.0)
        return x


@pytest.mark.parametrize("function", [Doubled, Same, InPlace])
def test_an_autograd_function_in_the_models_forward_loses_no_gradient_silently(function):
    def forward(self, input_ids, labels=None):
        logits = function.apply(self.lm_head(hidden_of(self, input_ids)))
        return Out(loss=self.loss_function(logits, labels, VOCAB), logits=logits)

    with pytest.raises(RuntimeError, match=r"expected device meta|in-place"):
        with_forward(forward)[1](**batch()).loss.backward()


def test_metrics_without_gradients():
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(hidden_of(self, input_ids))
        with torch.no_grad():
            entropy = -(logits.float() / 2.0).log_softmax(-1).mean()
        return Out(loss=self.loss_function(logits, labels, VOCAB), entropy=entropy)

    model, plugged = with_forward(forward)
    compare(step(plugged, may_warn=True), step(model), BUDGET)
    assert not plugged(**batch())["entropy"].requires_grad


@pytest.mark.parametrize("given", [{}, {"logits": True}], ids=str)
def test_what_a_forward_holds_ends_with_its_results(given):
    """Hidden states and real logits would otherwise stay until Python collects its garbage."""
    plugged = ours(theirs("gemma2, softcap"))
    assert tensors_in_cycles(lambda: plugged(**batch(), **given).loss.backward()) == []


def test_what_a_forward_holds_ends_when_it_fails():
    """As when memory runs out, and a smaller batch is tried."""
    plugged = ours(theirs())

    def fails() -> None:
        with pytest.raises(
            ValueError, match="pass labels of the shape of input_ids, and no logits_"
        ):
            plugged(**batch(), logits_to_keep=3)

    assert tensors_in_cycles(fails) == []


def test_logits_that_a_model_keeps_are_closed_after_the_forward():
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(hidden_of(self, input_ids))
        self.kept = logits
        return Out(loss=self.loss_function(logits, labels, VOCAB))

    _, plugged = with_forward(forward)
    plugged(**batch())
    for use in (
        lambda x: x.argmax(-1),
        lambda x: torch.stack([x]),
        lambda x: x.shape,
        lambda x: x * 2,
    ):
        with pytest.raises(RuntimeError, match=r"a forward of the model that is over.*logits=True"):
            use(plugged.kept)
