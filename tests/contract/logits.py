"""Lines of the contract: real logits, what sees them, other models, and refusals."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flce_dist.megatron import use_linear_cross_entropy
from tests.contract.compare import (
    BUDGET,
    against_megatron,
    compare,
    line,
    need_argument,
    need_attribute,
)
from tests.contract.gradients import loss_and_gradients
from tests.contract.models import H, S, Setting, batch, gpt, uneven
from tests.contract.other_models import hybrid, t5
from tests.contract.training import wrapped_in_ddp


@line("labels=None: real logits, of this rank or gathered")
def without_labels(at: Setting) -> float:
    def run(model: Any) -> dict[str, Any]:
        tokens, positions, _ = batch()
        found = {}
        for gather in (False, True):
            logits = model(tokens, positions, None, runtime_gather_output=gather)
            assert type(logits) is Tensor
            found[f"gather {gather}"] = logits
            uneven(logits.sum(-1)).backward()
        return {**found, "gradient": model.output_layer.weight.grad}

    return against_megatron(partial(gpt, at), run)


@line("compute_mtp_single_step")
def mtp_single_step(at: Setting) -> float:
    from megatron.core.models.gpt import GPTModel

    need_attribute(GPTModel, "compute_mtp_single_step")

    def run(model: Any) -> dict[str, Any]:
        torch.manual_seed(2)
        hidden, ids = torch.randn(4, 1, H), torch.arange(4)[None]
        hidden, logits = model.compute_mtp_single_step(hidden, ids, ids, 0)
        return {"hidden": hidden, "logits": logits}

    return against_megatron(partial(gpt, Setting(at.tp, False), mtp=1), run)


@line("forward hooks see real logits and may change them")
def hooks(at: Setting) -> float:
    def run(model: Any) -> dict[str, Any]:
        seen = []

        def halve(layer: Any, args: Any, result: Any) -> Any:
            seen.append(result[0].detach().clone())  # Megatron's loss works in place
            return result[0] * 0.5, result[1]

        model.output_layer.register_forward_hook(halve)
        found = loss_and_gradients(model)
        (logits,) = seen
        return {**found, "logits": logits}

    return against_megatron(partial(gpt, at), run)


@line("compute_language_model_loss of real logits")
def loss_of_logits(at: Setting) -> float:
    def run(model: Any) -> dict[str, Any]:
        tokens, positions, labels = batch()
        logits = model(tokens, positions, None).transpose(0, 1).contiguous()
        return {"loss": model.compute_language_model_loss(labels, logits)}

    return against_megatron(partial(gpt, at), run)


@line("a user's output_processor")
def processor(at: Setting) -> float:
    from megatron.core.models.gpt import GPTModel

    need_argument(GPTModel.forward, "output_processor")

    def process(**given: Any) -> tuple[Tensor, Tensor]:
        logits, _ = given["output_layer"](given["hidden_states"], weight=given["output_weight"])
        found = logits.detach().clone()
        return found, given["compute_language_model_loss"](given["labels"], logits * 0.5)

    def run(model: Any) -> dict[str, Any]:
        tokens, positions, labels = batch()
        logits, loss = model(tokens, positions, None, labels=labels, output_processor=process)
        uneven(loss).backward()
        gradients: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
        return {"logits": logits, "loss": loss.detach(), **gradients}

    return against_megatron(partial(gpt, at, tied=True, mtp=1), run)


@line("parameters are gathered and released around each use")
def gathered_parameters(at: Setting) -> float:
    """As FSDP does it: outside calls of the layer its weight is not there."""

    def run(model: Any) -> dict[str, Any]:
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

    return against_megatron(partial(gpt, at), run)


@line("cross_entropy_loss_fusion left on")
def loss_fusion(at: Setting) -> float:
    """The same loss as Megatron's unfused one; its fused one is compiled."""
    ours = loss_and_gradients(
        use_linear_cross_entropy(
            gpt(at, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native")
        )
    )
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


@line("T5 and its bias")
def t5_model(at: Setting) -> float:
    def run(model: Any) -> dict[str, Any]:
        tokens, _, labels = batch()
        mask = torch.zeros(tokens.shape[0], 1, S, S, dtype=torch.bool)
        loss = model(tokens, tokens, mask, mask, mask, lm_labels=labels)
        uneven(loss).backward()
        logits = model(tokens, tokens, mask, mask, mask).detach()
        layer = model.output_layer
        head = layer.weight.grad if layer.bias is None else layer.bias.grad
        return {"loss": loss.detach(), "logits": logits, "head": head}

    return max(against_megatron(partial(t5, at, tied), run) for tied in (False, True))


@line("Mamba and hybrid models")
def hybrid_model(at: Setting) -> float:
    return against_megatron(partial(hybrid, at), loss_and_gradients)


def refused(model: Any, error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        use_linear_cross_entropy(model, **options)


@line("refusals by name")
def refusals(at: Setting) -> float:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    class Thrice(GPTModel):
        def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
            return 3 * super().compute_language_model_loss(labels, logits)

    model = gpt(at)
    model.config.defer_embedding_wgrad_compute = True
    refused(model, NotImplementedError, "config.defer_embedding_wgrad_compute=True")
    model.config.defer_embedding_wgrad_compute = False
    model.output_layer.gtp_remat_size = 2
    refused(model, NotImplementedError, "output_layer is sharded by GTP")
    del model.output_layer.gtp_remat_size
    model.embedding.word_embeddings.weight.is_gtp_weight_remat = True
    refused(model, NotImplementedError, "embedding is sharded by GTP")
    del model.embedding.word_embeddings.weight.is_gtp_weight_remat

    model.__class__ = Thrice
    refused(model, NotImplementedError, "Thrice must have megatron-core's compute_language")
    model.__class__ = GPTModel
    model.compute_language_model_loss = lambda labels, logits: logits.sum()
    refused(model, NotImplementedError, "GPTModel must have megatron-core's compute_language")
    del model.compute_language_model_loss

    model.config.bf16 = True
    refused(Float16Module(model.config, model), ValueError, "wrapped in Float16Module")
    refused(wrapped_in_ddp(gpt(at)), ValueError, "wrapped in DistributedDataParallel")
    refused(model, NotImplementedError, 'schedule="in_forward"', schedule="in_forward")
    wrong: list[Any] = [{"label_smoothing": 2.0}, {"vocab_size": True}, {"vocab_size": 1 << 20}]
    for option in wrong:
        refused(model, ValueError, f"^{next(iter(option))} must be ", **option)
    refused(model, ValueError, 'reduction must be "none" or "sum"', reduction="mean")
    predicting = gpt(at, mtp=1)
    refused(predicting, NotImplementedError, "multi-token prediction", reduction="sum")
    refused(model, TypeError, "Did you mean 'softcap'", soft_cap=1.0)

    layer = model.output_layer
    model.output_layer = nn.Linear(2, 2)
    refused(model, NotImplementedError, "of megatron-core, got Linear")
    model.output_layer = type("TELMHeadColumnParallelLinear", (nn.Linear,), {})(2, 2)
    refused(model, NotImplementedError, "set fp8_output_proj=False")
    del model.output_layer
    refused(model, ValueError, "pipeline stages")
    model.output_layer = layer
    refused(use_linear_cross_entropy(model), ValueError, "twice")

    tied = gpt(at, tied=True)
    tied.output_layer.gradient_accumulation_fusion = True
    tied.embedding.word_embeddings.weight.__fsdp_param__ = True
    with pytest.raises(NotImplementedError, match="Megatron-FSDP and tied embeddings"):
        loss_and_gradients(use_linear_cross_entropy(tied))
    return 0.0
