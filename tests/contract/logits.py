"""Lines of the contract: real logits, what sees them, other models, and refusals."""

import operator
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flce_dist.megatron import use_linear_cross_entropy
from tests.contract.compare import BUDGET, compare, compared, line, need
from tests.contract.gradients import gradients_of, loss_and_gradients
from tests.contract.models import H, S, Setting, batch, gpt, hybrid, in_ddp, t5, uneven


def of_no_labels(model: Any) -> dict[str, Any]:
    tokens, positions, _ = batch()
    found = {}
    for gather in (False, True):
        logits = model(tokens, positions, None, runtime_gather_output=gather)
        assert type(logits) is Tensor
        found[f"gather {gather}"] = logits
        uneven(logits.sum(-1)).backward()
    return {**found, "gradient": model.output_layer.weight.grad}


compared("labels=None: real logits, of this rank or gathered", of_no_labels, {})


def predicted_by_one_step(model: Any) -> dict[str, Any]:
    need("compute_mtp_single_step", dir(model), type(model))
    torch.manual_seed(2)
    hidden = torch.randn(4, 1, H)
    ids = torch.arange(4)[None]
    hidden, logits = model.compute_mtp_single_step(hidden, ids, ids, 0)
    return {"hidden": hidden, "logits": logits}


compared(
    "compute_mtp_single_step", predicted_by_one_step, {"mtp": 1},
    model=lambda at, **options: gpt(Setting(at.tp, False), **options),
)  # fmt: skip


def hooked(model: Any) -> dict[str, Any]:
    seen = []

    def halve(layer: Any, args: Any, result: Any) -> Any:
        seen.append(result[0].detach().clone())  # Megatron's loss works in place
        return result[0] * 0.5, result[1]

    model.output_layer.register_forward_hook(halve)
    found = loss_and_gradients(model)
    (logits,) = seen
    return {**found, "logits": logits}


compared("forward hooks see real logits and may change them", hooked, {})


def loss_of_logits(model: Any) -> dict[str, Any]:
    tokens, positions, labels = batch()
    logits = model(tokens, positions, None).transpose(0, 1).contiguous()
    return {"loss": model.compute_language_model_loss(labels, logits)}


compared("compute_language_model_loss of real logits", loss_of_logits, {})


def processed(model: Any) -> dict[str, Any]:
    forward = type(model).forward
    need("output_processor", signature(forward).parameters, forward)

    def process(**given: Any) -> tuple[Tensor, Tensor]:
        logits, _ = given["output_layer"](given["hidden_states"], weight=given["output_weight"])
        found = logits.detach().clone()
        return found, given["compute_language_model_loss"](given["labels"], logits * 0.5)

    tokens, positions, labels = batch()
    logits, loss = model(tokens, positions, None, labels=labels, output_processor=process)
    return {"logits": logits, "loss": loss.detach(), **gradients_of(model, loss)}


compared("a user's output_processor", processed, {"tied": True, "mtp": 1})


def gathered_and_released(model: Any) -> dict[str, Any]:
    """As FSDP does it: outside calls of the layer its weight is not there."""
    layer = model.output_layer
    weight = layer.weight.data.clone()

    def gather(*given: Any) -> None:
        layer.weight.data.copy_(weight)

    def release(*given: Any) -> None:
        layer.weight.data.fill_(float("nan"))

    gather.__module__ = release.__module__ = "megatron.core.distributed"
    release()
    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(release)
    tokens, positions, labels = batch()
    with torch.no_grad():
        return {"loss": model(tokens, positions, None, labels=labels)}


compared("parameters are gathered and released around each use", gathered_and_released, {})


@line("cross_entropy_loss_fusion left on")
def loss_fusion(at: Setting) -> float:
    """The same loss as Megatron's unfused one; its fused one is compiled."""
    fused = gpt(at, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native")
    ours = loss_and_gradients(use_linear_cross_entropy(fused))
    return compare(ours, loss_and_gradients(gpt(at)), BUDGET[torch.float32])


@line("accuracy, entropy and lse of the same pass")
def metrics(at: Setting) -> float:
    model = use_linear_cross_entropy(gpt(at), metrics=True)
    tokens, positions, labels = batch()
    loss = model(tokens, positions, None, labels=labels)
    found = model.output_layer.last_metrics
    ours = {"loss": loss, "correct": found.correct, "entropy": found.entropy, "lse": found.lse}
    with torch.no_grad():
        logits = gpt(at)(tokens, positions, None, runtime_gather_output=True)
    log_p = logits.log_softmax(-1)
    theirs = {
        "loss": -log_p.gather(-1, labels[..., None])[..., 0],
        "correct": logits.argmax(-1) == labels,
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "lse": logits.logsumexp(-1),
    }
    correct = ours.pop("correct"), theirs.pop("correct")
    assert torch.equal(*correct)
    return compare(ours, theirs, BUDGET[torch.float32])


def t5_loss_and_logits(model: Any) -> dict[str, Any]:
    tokens, _, labels = batch()
    mask = torch.zeros(tokens.shape[0], 1, S, S, dtype=torch.bool)
    loss = model(tokens, tokens, mask, mask, mask, lm_labels=labels)
    uneven(loss).backward()
    logits = model(tokens, tokens, mask, mask, mask).detach()
    layer = model.output_layer
    head = layer.weight.grad if layer.bias is None else layer.bias.grad
    return {"loss": loss.detach(), "logits": logits, "head": head}


compared("T5 and its bias", t5_loss_and_logits, {"tied": False}, {"tied": True}, model=t5)
compared("Mamba and hybrid models", loss_and_gradients, {}, model=hybrid)


@line("refusals by name")
def refusals(at: Setting) -> float:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    class Thrice(GPTModel):
        def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
            return 3 * super().compute_language_model_loss(labels, logits)

    def refused(model: Any, error: type[Exception], match: str, **options: Any) -> None:
        with pytest.raises(error, match=match):
            use_linear_cross_entropy(model, **options)

    te_layer = type("TELMHeadColumnParallelLinear", (nn.Linear,), {})
    changes: list[tuple[str, Any, str]] = [
        ("config.defer_embedding_wgrad_compute", True, "config.defer_embedding_wgrad_compute=True"),
        ("output_layer.gtp_remat_size", 2, "output_layer is sharded by GTP"),
        ("embedding.word_embeddings.weight.is_gtp_weight_remat", True, "embedding is sharded by"),
        ("__class__", Thrice, "Thrice must have megatron-core's compute_language"),
        ("compute_language_model_loss", max, "GPTModel must have megatron-core's compute_language"),
        ("output_layer", nn.Linear(2, 2), "of megatron-core, got Linear"),
        ("output_layer", te_layer(2, 2), "set fp8_output_proj=False"),
    ]
    for path, value, match in changes:
        owner, _, name = ("model." + path).rpartition(".")
        model = gpt(at)
        setattr(operator.attrgetter(owner)(SimpleNamespace(model=model)), name, value)
        refused(model, NotImplementedError, match)

    model = gpt(at)
    model.config.bf16 = True
    refused(Float16Module(model.config, model), ValueError, "wrapped in Float16Module")
    refused(in_ddp(gpt(at)), ValueError, "wrapped in DistributedDataParallel")
    refused(model, NotImplementedError, 'schedule="in_forward"', schedule="in_forward")
    wrong: list[Any] = [{"label_smoothing": 2.0}, {"vocab_size": True}, {"vocab_size": 1 << 20}]
    for option in wrong:
        refused(model, ValueError, f"^{next(iter(option))} must be ", **option)
    refused(model, ValueError, 'reduction must be "none" or "sum"', reduction="mean")
    refused(gpt(at, mtp=1), NotImplementedError, "multi-token prediction", reduction="sum")
    refused(model, TypeError, "Did you mean 'softcap'", soft_cap=1.0)
    del model.output_layer
    refused(model, ValueError, "pipeline stages")

    tied = gpt(at, tied=True)
    tied.output_layer.gradient_accumulation_fusion = True
    tied.embedding.word_embeddings.weight.__fsdp_param__ = True
    with pytest.raises(NotImplementedError, match="Megatron-FSDP and tied embeddings"):
        loss_and_gradients(use_linear_cross_entropy(tied))
    return 0.0
