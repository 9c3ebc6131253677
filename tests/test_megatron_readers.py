"""What sits on Megatron's output layer acts once, and what reads logits gets them.

Each case changes a model with the plug-in and one without in the same way. Loss and gradients are
compared, and the calls of the output layer and the logits that it makes are counted.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("megatron.core")

from flce_dist.megatron import scores, use_linear_cross_entropy
from flce_dist.testing import run_ranks
from tests.contract.compare import compare
from tests.contract.models import VOCAB, H, Setting, batch, gpt, t5, uneven
from tests.megatron_changes import (
    BEFORE,
    CHANGES,
    READERS,
    converted,
    counted,
    hooked,
    patched,
    with_another_loss,
    wrapped,
)
from tests.on_ranks import on_ranks

BUDGET = 1e-5  # relative RMS in fp32


def loss_and_gradients(model: Any) -> dict[str, Any]:
    tokens, positions, labels = batch()
    loss = model(tokens, positions, None, labels=labels)
    uneven(loss).backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def changed(model: Any, change: Any) -> dict[str, Any]:
    undo = change(model)
    try:
        return loss_and_gradients(model)
    finally:
        if undo is not None:
            undo()


CASES = [(tp, sp, name) for tp, sp in ((1, False), (2, False), (2, True)) for name in CHANGES]
CASES.remove((2, True, "a wrapper"))  # whose adapter has no sequence parallelism


def model_for(name: str, at: Setting) -> Any:
    """In fp32 Megatron's loss works on logits in place, which PyTorch refuses under such hooks."""
    return gpt(at, bf16="gradient" in name)


@pytest.mark.parametrize(("tp", "sp", "name"), CASES, ids=str)
@on_ranks("tp")
def test_what_is_added_after_the_plug_in(group, tp, sp, name):
    at = Setting(tp, sp)
    expected = changed(model_for(name, at), CHANGES[name])
    model = use_linear_cross_entropy(model_for(name, at))
    reads = name in READERS
    with counted(model.output_layer) as counts, warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        found = changed(model, CHANGES[name])
    compare(found, expected, BUDGET)
    assert (counts.calls, counts.logits) == (1, int(reads))
    messages = [str(one.message) for one in shown if "output_layer" in str(one.message)]
    assert len(messages) == int(reads), messages
    assert all("makes the logits of all tokens, because" in one for one in messages)


@pytest.mark.parametrize("name", BEFORE)
@on_ranks(2)
def test_what_was_there_before_the_plug_in(group, name):
    plain, model = (model_for(name, Setting(2, True)) for _ in range(2))
    CHANGES[name](plain)
    CHANGES[name](model)
    use_linear_cross_entropy(model)
    with counted(model.output_layer) as counts, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = loss_and_gradients(model)
    compare(found, loss_and_gradients(plain), BUDGET)
    assert (counts.calls, counts.logits) == (1, int(name in READERS))


@on_ranks(1)
def test_what_is_refused(group):
    at = Setting(1, False)
    for change, match in (
        (patched, "must have the forward of its class, got it patched"),
        (wrapped, "got LoRALinear; leave output_layer out of what is wrapped"),
        (converted, "got QuantColumnParallelLinear"),
        (with_another_loss, "must have megatron-core's compute_language_model_loss"),
    ):
        model = gpt(at)
        change(model)
        with pytest.raises(NotImplementedError, match=match):
            use_linear_cross_entropy(model)
    for change, match in ((wrapped, "wrapped in LoRALinear"), (patched, "its forward is patched")):
        for option in ("softcap", "logit_scale"):
            options: dict[str, Any] = {option: 0.5}
            model = use_linear_cross_entropy(gpt(at), **options)
            change(model)
            with pytest.raises(NotImplementedError, match=match):
                loss_and_gradients(model)
    for change in (hooked, wrapped, with_another_loss):
        model = use_linear_cross_entropy(gpt(at), label_smoothing=0.1)
        change(model)
        with pytest.raises(NotImplementedError, match=r"does not apply label_smoothing=0\.1"):
            loss_and_gradients(model)
    tokens, positions, labels = batch()
    model = use_linear_cross_entropy(gpt(at))
    wrapped(model)
    with pytest.raises(NotImplementedError, match="without wrappers, patches and hooks of others"):
        scores(model, labels[..., None], tokens, positions, None)


@on_ranks(1)
def test_an_output_layer_that_is_replaced(group):
    at = Setting(1, False)
    model = use_linear_cross_entropy(gpt(at))
    model.output_layer = gpt(at).output_layer
    with pytest.raises(ValueError, match=r"^model.output_layer must be the one .* call it again"):
        loss_and_gradients(model)
    with counted(model.output_layer) as counts:
        found = loss_and_gradients(use_linear_cross_entropy(model, metrics=True))
    compare(found, loss_and_gradients(gpt(at)), BUDGET)
    assert (counts.calls, counts.logits) == (1, 0)
    assert torch.equal(model.output_layer.last_metrics.loss, found["loss"])
    hooked(model)
    with pytest.warns(UserWarning, match="the hook hooked.<locals>.<lambda> is registered on it"):
        loss_and_gradients(model)
    assert model.output_layer.last_metrics is None


@on_ranks(1)
def test_the_logger_of_inputs_gets_real_logits(group, tmp_path):
    model = use_linear_cross_entropy(gpt(Setting(1, False)), metrics=True)
    loss_and_gradients(model)
    assert model.output_layer.last_metrics is not None
    model.zero_grad()
    model.config.config_logger_dir = str(tmp_path)
    message = "makes the logits of all tokens, because config.config_logger_dir is set"
    with counted(model.output_layer) as counts, pytest.warns(UserWarning, match=message):
        found = loss_and_gradients(model)
    assert (counts.calls, counts.logits) == (1, 1)
    assert model.output_layer.last_metrics is None
    compare(found, loss_and_gradients(gpt(Setting(1, False))), BUDGET)
    logged = next(tmp_path.glob("input_and_logits*"))
    assert type(torch.load(logged)["logits"]) is Tensor
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*output_layer")
        model(*batch()[:2], None)  # without labels, as before


@on_ranks(1)
def test_metrics_are_those_of_the_latest_loss(group):
    """Also where others compute it: Megatron's overlapped schedule, or a user's own code."""
    model = use_linear_cross_entropy(gpt(Setting(1, False)), metrics=True)
    tokens, positions, labels = batch()
    logits = model(tokens, positions, None).transpose(0, 1).contiguous()
    loss_and_gradients(model)
    assert model.output_layer.last_metrics is not None
    model.compute_language_model_loss(labels, logits)
    assert model.output_layer.last_metrics is None


@on_ranks(2)
def test_multi_token_prediction_calls_it_once_per_depth(group):
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    found = []
    for plugs in (True, False):
        model = gpt(Setting(2, True), mtp=2)
        if plugs:
            use_linear_cross_entropy(model)
        with counted(model.output_layer) as counts:
            loss_and_gradients(model)
        assert (counts.calls, counts.logits) == (3, 0 if plugs else 3)
        kept = MTPLossLoggingHelper.tracker
        found.append({k: x.clone() for k, x in kept.items() if isinstance(x, Tensor) and x.any()})
    ours, theirs = found
    compare(ours, theirs, BUDGET)


@on_ranks(2)
def test_the_head_of_t5(group):
    """Its own module calls the output layer; hooks of that one are heard, too."""
    for change, reads in ((None, False), ("hook", True)):
        losses = []
        for plugs in (True, False):
            model = t5(Setting(2, True), tied=True)
            if plugs:
                use_linear_cross_entropy(model)
            if change is not None:
                model.lm_head.register_forward_hook(lambda _, args, logits: 0.5 * logits)
            tokens, _, labels = batch()
            mask = torch.zeros(tokens.shape[0], 1, *2 * tokens.shape[1:], dtype=torch.bool)
            with counted(model.output_layer) as counts, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses.append(model(tokens, tokens, mask, mask, mask, lm_labels=labels))
            assert (counts.calls, counts.logits) == (1, int(reads or not plugs))
        compare({"loss": losses[0]}, {"loss": losses[1]}, BUDGET)


@on_ranks(2)
def test_hooks_of_fsdp_read_no_logits(group):
    """FSDP2 gathers the weight for the one call, and releases it behind."""
    mesh = init_device_mesh("cpu", (2,))
    for tied in (False, True):
        plain, model = (gpt(Setting(1, False), tied=tied) for _ in range(2))
        use_linear_cross_entropy(model)
        for sharded in (plain, model):
            modules = [sharded] if tied else [sharded.output_layer, sharded]
            for module in modules:
                fully_shard(module, mesh=mesh)
                module.set_force_sum_reduction_for_comms(True)
        with counted(model.output_layer) as counts, warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*(output_layer|FSDP2)")
            found = loss_and_gradients(model)
        assert (counts.calls, counts.logits) == (1, 0)
        assert type(model.output_layer).__name__.startswith("FSDP") != tied
        expected = loss_and_gradients(plain)
        ours, theirs = ({k: local(x) for k, x in part.items()} for part in (found, expected))
        compare(ours, theirs, BUDGET)


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@on_ranks(1)
def test_flop_counters_read_no_logits(group):
    model = use_linear_cross_entropy(gpt(Setting(1, False)))
    with FlopCounterMode(display=False), counted(model.output_layer) as counts:
        loss_and_gradients(model)
    assert (counts.calls, counts.logits) == (1, 0)


def compiled_rank(group: Any) -> None:
    """With an option that Megatron's loss of real logits would refuse."""
    expected = loss_and_gradients(
        use_linear_cross_entropy(gpt(Setting(1, False)), z_loss_weight=0.1)
    )
    for whole in (True, False):
        model = use_linear_cross_entropy(gpt(Setting(1, False)), z_loss_weight=0.1)
        if whole:
            model.compile(backend="aot_eager")
        else:
            model.forward = torch.compile(model.forward, backend="aot_eager")
        compare(loss_and_gradients(model), expected, BUDGET)


def test_a_compiled_model_makes_no_logits():
    run_ranks(compiled_rank, 1, backend="gloo")


@on_ranks(1)
def test_no_symbol_leaves_a_forward(group):
    """Not in what a model returns, nor in the model after an error."""
    from megatron.core.models.gpt import GPTModel

    class Both(GPTModel):
        def compute_language_model_loss(self, labels: Tensor, logits: Any) -> Any:
            raise AssertionError("the plug-in's is called")

        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            logits, _ = self.output_layer(torch.ones(4, 2, H))
            return {"loss": 0.0, "all": [(logits,)]}

    model = use_linear_cross_entropy(gpt(Setting(1, False)))
    layer = model.output_layer
    with pytest.raises(ValueError, match="labels"):
        tokens, positions, labels = batch()
        model(tokens, positions, None, labels=labels + VOCAB)
    assert model.output_layer is layer and layer.question is None
    model.zero_grad()
    model.__class__ = Both
    with pytest.raises(NotImplementedError, match="returns the logits of"):
        model(labels=batch()[2])
    assert model.output_layer is layer
    model.__class__ = GPTModel
    compare(loss_and_gradients(model), loss_and_gradients(gpt(Setting(1, False))), BUDGET)
