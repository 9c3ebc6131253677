"""Lines of the contract: the loss of each token and every gradient, without fusion."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from tests.contract.compare import compared, need
from tests.contract.models import agree, batch, packing_of, uneven


def loss_and_gradients(model: Any) -> dict[str, Any]:
    """The loss [b, s] and the gradient of each parameter, None where there is none."""
    tokens, positions, labels = batch()
    loss = model(tokens, positions, None, labels=labels)
    agree(loss)
    return {"loss": loss.detach(), **gradients_of(model, loss)}


def gradients_of(model: Any, loss: Tensor) -> dict[str, Any]:
    uneven(loss).backward()
    return {name: p.grad for name, p in model.named_parameters()}


BOTH = {"tied": True}, {"tied": False}

compared("loss of each token, every gradient", loss_and_gradients, {})
compared("tied embeddings", loss_and_gradients, {"tied": True})
compared("bf16 parameters", loss_and_gradients, {"bf16": True}, dtype=torch.bfloat16)
compared("multi-token prediction, two depths", loss_and_gradients, *({**x, "mtp": 2} for x in BOTH))
compared(
    "multi-token prediction with detached heads", loss_and_gradients,
    *({**x, "mtp": 2, "mtp_detach_heads": True} for x in BOTH), needs="mtp_detach_heads",
)  # fmt: skip


compared(
    "frozen output layer", loss_and_gradients, {},
    change=lambda model: model.output_layer.weight.requires_grad_(False),
)  # fmt: skip
compared(
    "frozen trunk", loss_and_gradients, {},
    change=lambda model: model.requires_grad_(False).output_layer.requires_grad_(True),
)  # fmt: skip


compared(
    "MuP's scale of the logits", loss_and_gradients,
    {"mtp": 1, "use_mup": True, "mup_output_mult": 0.3}, needs="use_mup",
)  # fmt: skip


def packed_loss_and_gradients(model: Any) -> dict[str, Any]:
    """The batch as one row of three sequences."""
    tokens, positions, labels = (ids.reshape(1, -1) for ids in batch())
    loss = model(tokens, positions, None, labels=labels, packed_seq_params=packing_of(tokens))
    return {"loss": loss.detach(), **gradients_of(model, loss)}


compared("packed sequences", packed_loss_and_gradients, {})


def packed_mtp(model: Any) -> dict[str, Any]:
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    need("packed_seq_params", signature(roll_tensor).parameters, roll_tensor)
    return packed_loss_and_gradients(model)


compared("packed sequences, multi-token prediction", packed_mtp, {"mtp": 1})
