"""Lines of the contract: the loss of each token and every gradient, without fusion."""

from functools import partial
from typing import Any

import torch

from tests.contract.compare import against_megatron, compared, line, need_argument, need_config
from tests.contract.models import Setting, agree, batch, gpt, uneven


def loss_and_gradients(model: Any) -> dict[str, Any]:
    """The loss [b, s] and the gradient of each parameter, None where there is none."""
    tokens, positions, labels = batch()
    loss = model(tokens, positions, None, labels=labels)
    agree(loss)
    uneven(loss).backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def fp32_loss_and_gradients(model: Any) -> dict[str, Any]:
    found = loss_and_gradients(model)
    assert found["loss"].dtype == torch.float32
    return found


BOTH = {"tied": True}, {"tied": False}

compared("loss of each token, every gradient", loss_and_gradients, {})
compared("tied embeddings", loss_and_gradients, {"tied": True})
compared("bf16 parameters", fp32_loss_and_gradients, {"bf16": True}, dtype=torch.bfloat16)
compared("multi-token prediction, two depths", loss_and_gradients, *({**x, "mtp": 2} for x in BOTH))
compared(
    "multi-token prediction with detached heads", loss_and_gradients,
    *({**x, "mtp": 2, "mtp_detach_heads": True} for x in BOTH), needs="mtp_detach_heads",
)  # fmt: skip


@line("frozen output layer")
def frozen_layer(at: Setting) -> float:
    def build() -> Any:
        model = gpt(at)
        model.output_layer.weight.requires_grad_(False)
        return model

    return against_megatron(build, loss_and_gradients)


@line("frozen trunk")
def frozen_trunk(at: Setting) -> float:
    def build() -> Any:
        model = gpt(at)
        model.requires_grad_(False)
        model.output_layer.weight.requires_grad_(True)
        return model

    return against_megatron(build, loss_and_gradients)


@line("MuP's scale of the logits")
def mup(at: Setting) -> float:
    need_config("use_mup")

    def build() -> Any:
        model = gpt(at, mtp=1, use_mup=True, mup_output_mult=0.3)
        assert model.config.mup_output_mult == 0.3
        return model

    return against_megatron(build, loss_and_gradients)


def packed_loss_and_gradients(model: Any) -> dict[str, Any]:
    """The batch as one row of three sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, positions, labels = (ids.reshape(1, -1) for ids in batch())
    ends = torch.tensor([0, 5, 12, tokens.numel()], dtype=torch.int32)
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=20, max_seqlen_kv=20
    )
    loss = model(tokens, positions, None, labels=labels, packed_seq_params=packing)
    uneven(loss).backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


compared("packed sequences", packed_loss_and_gradients, {})


@line("packed sequences, multi-token prediction")
def packed_mtp(at: Setting) -> float:
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    need_argument(roll_tensor, "packed_seq_params")
    return against_megatron(partial(gpt, at, mtp=1), packed_loss_and_gradients)
