"""The plug-in for transformers in one process: equal to the model's own step, or refused."""

import copy
import inspect
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from flce_dist import linear_cross_entropy
from flce_dist.hf import NO_LOGITS, restore, use_linear_cross_entropy
from tests.contract.compare import compare
from tests.hf_models import KINDS, VOCAB, B, S, batch, gradients, ours, real_logits, step, theirs

BUDGET = 1e-5  # fp32


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_equals_the_models_own(kind):
    model = theirs(kind)
    plugged = ours(model)
    shifted = torch.randint(VOCAB, (B, S), generator=torch.Generator().manual_seed(2))
    own = {"ignore_index": 8, "labels": batch()["labels"].clamp(min=8), "num_items_in_batch": 5}
    of_counts: Any = {"num_items_in_batch": torch.tensor(7)}, {"num_items_in_batch": 0.25}
    for given in ({}, *of_counts, {"shift_labels": shifted}, own):
        compare(step(plugged, **given), step(model, **given), BUDGET)
    with real_logits() as made:
        assert plugged(**batch()).logits is NO_LOGITS
    assert made == []


@pytest.mark.parametrize("kind", KINDS)
def test_logits_beside_the_loss(kind):
    """At once, once, with autograd; the loss is what it is without them."""
    model = theirs(kind)
    plugged = ours(model)

    def both(one: Any, **given: Any) -> dict[str, Any]:
        one.zero_grad()
        out = one(**batch(), **given)
        (out.loss - 0.1 * out.logits.float().log_softmax(-1)[..., 3].mean()).backward()
        return {"loss": out.loss.detach(), "logits": out.logits.detach(), **gradients(one)}

    with real_logits() as made:
        found = both(plugged, logits=True)
    assert made == [(B, S, VOCAB)]
    compare(found, both(model), BUDGET)
    assert torch.equal(found["loss"], plugged(**batch()).loss)


def test_positional_labels_and_tuples():
    model = theirs("gemma2, softcap")
    plugged = ours(model)
    assert inspect.signature(plugged.forward) == inspect.signature(model.forward)
    names = list(inspect.signature(model.forward).parameters)
    values = [batch().get(name) for name in names[: names.index("labels") + 1]]
    loss, logits, *_ = plugged(*values, return_dict=False)
    assert logits is NO_LOGITS
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


def test_who_gets_logits():
    model = theirs("gemma2, softcap")
    plugged, always, never = ours(model), ours(model, logits=True), ours(model, logits=False)
    expected = model(**batch()).logits
    cases: list[tuple[Any, bool, dict[str, Any], bool]] = [
        (plugged, True, {}, False),
        (plugged, False, {}, True),
        (plugged, True, {"logits": True}, True),
        (plugged, False, {"logits": False}, False),
        (always, True, {}, True),
        (always, True, {"logits": False}, False),
        (never, False, {}, False),
        (never, False, {"logits": True}, True),
    ]
    for one, is_training, given, has_logits in cases:
        one.train(is_training)
        with real_logits() as made:
            found = one(**batch(), **given).logits
        assert len(made) == has_logits
        if has_logits:
            assert type(found) is Tensor and found.requires_grad
            assert torch.equal(found, expected)
        else:
            assert found is NO_LOGITS
    with torch.no_grad():
        assert not plugged.train()(**batch(), logits=True).logits.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert plugged(**batch(), logits=True).logits.dtype == torch.bfloat16
    for wrong, shown in (("yes", "'yes'"), (1, "1"), (expected, "a tensor of shape .*")):
        for call in (lambda x: ours(model, logits=x), lambda x: plugged(**batch(), logits=x)):
            with pytest.raises(ValueError, match=f"^logits must be None or a bool, got {shown}$"):
                call(wrong)


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

    @staticmethod
    def tiny(logits: Any) -> Any:
        return logits / 1e50

    @staticmethod
    def tiny_cap(logits: Any) -> Any:
        return torch.tanh(logits) * 1e-40


@pytest.mark.parametrize(
    "name", ["powers", "scaled", "negative", "twice", "written", "known", "tiny", "tiny_cap"]
)
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
    if name == "known":
        compare(step(plugged), step(model), BUDGET)
    else:
        with pytest.warns(UserWarning, match="the model asks for .* of its logits"):
            found = step(plugged, may_warn=True)
        compare(found, step(model), BUDGET)
        compare(step(plugged), found, 0.0)  # the warning comes once
        with pytest.raises(NotImplementedError, match=r"does not apply z_loss_weight=0\.1"):
            step(ours(model, z_loss_weight=0.1), may_warn=True)


def test_a_loss_of_each_token_is_flat_as_its_labels():
    model = theirs()
    of_tokens: list[Any] = []

    class Changed(type(model)):  # type: ignore[misc]
        def forward(self, input_ids, labels=None):
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)[:, :-1]
            flat = logits.reshape(-1, VOCAB), labels[:, 1:].reshape(-1)
            losses = nn.functional.cross_entropy(*flat, reduction="none")
            of_tokens.append(losses.detach())
            loss = losses @ torch.arange(len(losses)).float()
            return type("Out", (dict,), {"loss": loss})(loss=loss, logits=logits)

    model.__class__ = Changed
    compare(step(ours(model)), step(model), BUDGET)
    compare({"losses": of_tokens[0]}, {"losses": of_tokens[1]}, BUDGET)


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
    plugged = ours(model, z_loss_weight=1.0, logits=True)
    flat = (one(**batch()).logits.view(-1, VOCAB) for one in (plugged, model))
    found, expected = (nn.functional.cross_entropy(x, labels) for x in flat)
    torch.testing.assert_close(found, expected)


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


def test_a_model_that_its_class_makes_has_no_plug_in(tmp_path):
    """As code does that needs another model like this one, from its config or its files."""
    model = theirs()
    plugged = ours(model, label_smoothing=0.1)
    plugged.save_pretrained(tmp_path)
    made = type(plugged)(plugged.config)
    made.load_state_dict(plugged.state_dict())
    for one in (made, type(plugged).from_pretrained(tmp_path)):
        compare(step(one.train()), step(model), BUDGET)
        use_linear_cross_entropy(one, label_smoothing=0.1)
        with real_logits() as logits:
            compare(step(one), step(plugged), BUDGET)
        assert logits == []
        compare(step(restore(one)), step(model), BUDGET)


def test_a_forward_that_calls_the_model():
    """The inner call ends with its own logits alone."""
    model = theirs()

    class Twice(type(model)):  # type: ignore[misc]
        def forward(self, input_ids, labels=None, is_inner=False):
            if is_inner:
                return super().forward(input_ids=input_ids, labels=labels)
            inner = self(input_ids=input_ids, labels=labels, is_inner=True)
            outer = super().forward(input_ids=input_ids, labels=labels)
            return type(outer)(loss=outer.loss + inner.loss)

    plugged = ours(model, label_smoothing=0.1)
    expected = 2 * plugged(**batch()).loss
    model.__class__ = Twice
    with real_logits() as made:
        torch.testing.assert_close(ours(model, label_smoothing=0.1)(**batch()).loss, expected)
    assert made == []


def test_a_plugged_model_is_pickled():
    model = theirs("cohere, product")
    plugged = ours(model, logits=True, z_loss_weight=0.1)
    expected = step(plugged)
    compare(step(pickle.loads(pickle.dumps(plugged))), expected, 0.0)
    file = io.BytesIO()
    torch.save(plugged, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    compare(step(loaded), expected, 0.0)
    assert type(loaded) is type(plugged) and type(loaded.lm_head) is type(plugged.lm_head)
    compare(step(restore(loaded)), step(model), 0.0)


def test_another_process_loads_a_pickled_model(tmp_path):
    """As spawn hands it over: that process has plugged in nothing."""
    plugged = ours(theirs())
    torch.save({"model": plugged, "batch": batch()}, tmp_path / "all.pt")
    program = (
        "import sys, torch; found = torch.load(sys.argv[1], weights_only=False); "
        "print(found['model'](**found['batch']).loss.item())"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "all.pt")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    torch.testing.assert_close(torch.tensor(float(printed)), plugged(**batch()).loss.detach())


@pytest.mark.parametrize("count", [0, torch.tensor(0), 3, torch.tensor(3), None], ids=str)
@pytest.mark.parametrize("hooked", [False, True])
def test_a_batch_in_which_no_label_counts(count, hooked):
    """Its loss is 0, with gradients of 0; that of real logits too, if the count is passed."""
    plugged = ours(theirs())
    if hooked:
        if count is None:
            pytest.skip("the mean over no label is then PyTorch's: NaN")
        plugged.lm_head.register_forward_hook(lambda *given: None)
    labels = torch.full((B, S), -100)
    given = {} if count is None else {"num_items_in_batch": count}
    loss = plugged(input_ids=batch()["input_ids"], labels=labels, **given).loss
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in plugged.parameters())


@pytest.mark.parametrize("given", [{}, {"num_items_in_batch": 0}, {"ignore_index": 5}], ids=str)
def test_no_label_counts_in_an_evaluation(given):
    """Its loss is NaN, as the model's own: a 0 would lower an average over batches."""
    model = theirs()
    plugged = ours(model)
    for ignored in (B * S, B * S - 1):
        labels = torch.full((B * S,), given.get("ignore_index", -100))
        labels[ignored:] = 7
        losses = [
            one.eval()(input_ids=batch()["input_ids"], labels=labels.view(B, S), **given).loss
            for one in (plugged, model)
        ]
        torch.testing.assert_close(*losses, equal_nan=True)
        assert losses[0].isfinite() == (ignored < B * S and "num_items_in_batch" not in given)
        losses[0].backward()
    plugged.zero_grad()
    plugged(input_ids=batch()["input_ids"], labels=torch.full((B, S), -100)).loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in plugged.parameters())


def test_labels_to_leave_out_have_two_ways():
    """Those that errors name: the label -100, or the keyword of a call, as without the plug-in."""
    model = theirs()
    plugged = ours(model)
    given = batch()
    of_minus_one = given | {"labels": given["labels"].clamp(min=-1)}
    with pytest.raises(ValueError) as found:
        plugged(**of_minus_one)
    assert str(found.value) == (
        f"labels must be within [0, {VOCAB}) or ignore_index -100, got -1 at token 0: to leave "
        "such tokens out, give them the label -100 or pass ignore_index=-1"
    )
    with pytest.raises(TypeError) as refused:
        ours(model, ignore_index=-1)
    assert str(refused.value) == (
        "use_linear_cross_entropy() got an unexpected keyword argument 'ignore_index'. Give tokens "
        "to leave out the label -100, or pass ignore_index to each call of the model"
    )
    loss = plugged(**given).loss
    assert torch.equal(plugged(**of_minus_one, ignore_index=-1).loss, loss)
    torch.testing.assert_close(model(**of_minus_one, ignore_index=-1).loss, loss)


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

    class Mine(type(model)):  # type: ignore[misc]
        def forward(self, **kwargs: Any) -> Any:
            return super().forward(**kwargs)

    def without_labels(one: Any) -> Any:
        return Mine(one.config)

    def own_loss(one: Any) -> None:
        one.loss_function = lambda logits, labels, vocab_size: logits.sum()

    text = complaint(NotImplementedError, layer)
    assert "must be an nn.Linear, or LoRA on one, got Quantized" in text
    patched = complaint(NotImplementedError, own_forward)
    assert "of the instance with input_ids, " in patched
    assert patched.endswith("call it before others, such as accelerate, patch the model")
    assert complaint(NotImplementedError, without_labels).endswith("got that of Mine with kwargs")
    assert "loss_function must be ForCausalLMLoss" in complaint(NotImplementedError, own_loss)
    wrapped = complaint(NotImplementedError, nn.Sequential)
    assert "must be a PreTrainedModel or PeftModel, got Sequential" in wrapped
    assert complaint(NotImplementedError, nn.DataParallel).endswith("or pass model.module")
    of_head = complaint(NotImplementedError, lambda one: one.lm_head)
    assert of_head.endswith("got Linear: pass the model, whose output layer the plug-in finds")
    assert complaint(NotImplementedError, lambda one: "name").endswith("PeftModel, got str")
    without_head = complaint(NotImplementedError, lambda one: one.model)
    assert "got a LlamaModel without one: pass a model for causal" in without_head
    for name in ("softcap", "reduction", "logit_scale", "tp_group"):
        assert name in complaint(TypeError, lambda one: None, **{name: None})


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
    assert found.logits is NO_LOGITS
    asked = compiled(**batch(), logits=True)
    assert type(asked.logits) is Tensor and asked.logits.requires_grad
    torch.testing.assert_close(asked.logits, model(**batch()).logits)
    torch.testing.assert_close(asked.loss, expected["loss"])
