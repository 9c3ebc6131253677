"""Lines of the contract: what sits on the output layer acts once, and readers get real logits."""

import importlib
import logging
import typing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from flce_dist.megatron import scores, use_linear_cross_entropy
from tests.contract.compare import BUDGET, NotInThisVersion, compare, compared, line, need
from tests.contract.gradients import gradients_of, loss_and_gradients
from tests.contract.models import Setting, batch, gpt


def pre_hooked(model: Any) -> dict[str, Any]:
    seen = []

    def scale(layer: Any, args: Any) -> Any:
        seen.append(args[0].detach())
        return 1.5 * args[0], *args[1:]

    model.output_layer.register_forward_pre_hook(scale)
    found = loss_and_gradients(model)
    return {**found, "calls": len(seen), "hidden states": torch.stack(seen)}


compared("forward pre-hooks act once", pre_hooked, {}, {"tied": True, "mtp": 1})


def hooked_everywhere(model: Any) -> dict[str, Any]:
    layer = model.output_layer

    def halve(module: Any, args: Any, result: Any) -> Any:
        return (0.5 * result[0], result[1]) if module is layer else None

    handle = register_module_forward_hook(halve)
    try:
        return loss_and_gradients(model)
    finally:
        handle.remove()


compared("hooks of all modules see real logits and may change them", hooked_everywhere, {})


def patched(model: Any) -> dict[str, Any]:
    forward = model.output_layer.forward

    def shift(*args: Any, **kwargs: Any) -> Any:
        logits, bias = forward(*args, **kwargs)
        return logits + logits.detach().cos(), bias

    model.output_layer.forward = shift
    return loss_and_gradients(model)


class Wrapper(nn.Module):
    """Around the layer, whose weight it does not have."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        logits, bias = self.layer(hidden, *args, **kwargs)
        return 0.5 * logits, bias


def wrapped(model: Any) -> dict[str, Any]:
    model.output_layer = Wrapper(model.output_layer)
    return loss_and_gradients(model)


compared("a forward patched later sees real logits", patched, {})
compared("a wrapper put around the layer later sees real logits", wrapped, {})


def distilled(model: Any) -> dict[str, Any]:
    """The loss, and the logits that Megatron's own distillation captures of a student."""
    (folder,) = importlib.import_module("megatron.core").__path__
    if not (Path(folder).parent / "training" / "distillation").is_dir():
        raise NotInThisVersion("megatron.training has no distillation")
    if not hasattr(typing, "override"):  # before Python 3.12, which megatron.training needs
        vars(typing)["override"] = lambda method: method
    level = logging.root.level
    from megatron.training.distillation import StudentLogitsCapture

    logging.root.setLevel(level)  # the import makes Megatron tell of each bucket
    capture = StudentLogitsCapture()
    capture.attach_hooks(model)
    tokens, positions, labels = batch()
    loss = model(tokens, positions, None, labels=labels)
    logits = capture.pop()
    return {"loss": loss.detach(), "logits": logits.detach()}


compared("hooks of megatron.training.distillation see real logits", distilled, {})


def counted_right(model: Any) -> dict[str, Any]:
    """What multi-token prediction logs: its losses and, since 0.17, how many tokens are right."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    with torch.no_grad():
        for step in range(12):  # a random token is right once in 96 times
            tokens, positions, labels = batch(step)
            model(tokens, positions, None, labels=labels)
    tracker = MTPLossLoggingHelper.tracker
    return {name: x.clone() for name, x in tracker.items() if isinstance(x, Tensor)}


compared("losses and right tokens of multi-token prediction", counted_right, {"mtp": 2})


@line("scores, with multi-token prediction")
def scored(at: Setting) -> float:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    plain, model = (gpt(at, mtp=1) for _ in range(2))
    need("compute_mtp_single_step", dir(plain), type(plain))  # older ones fail without labels
    tokens, positions, labels = batch()
    logits = gather_from_tensor_model_parallel_region(plain(tokens, positions, None))
    expected = logits.log_softmax(-1).gather(-1, labels[..., None])
    found = scores(use_linear_cross_entropy(model), labels[..., None], tokens, positions, None)
    ours = {"scores": found.logprob, **gradients_of(model, found.logprob[..., 0])}
    theirs = {"scores": expected, **gradients_of(plain, expected[..., 0])}
    for name in [name for name, x in theirs.items() if name.startswith("mtp.") and not x.any()]:
        assert not ours[name].any(), name  # before 0.18 a call without labels predicts one token
        del ours[name], theirs[name]
    return compare(ours, theirs, BUDGET[torch.float32])
