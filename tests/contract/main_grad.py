"""Lines of the contract: gradient_accumulation_fusion, and Megatron's DDP."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.contract.compare import compared
from tests.contract.models import batch, in_ddp, uneven

MICROBATCHES = 3


def accumulated(model: Any, cp: int = 1, **ddp: Any) -> dict[str, Any]:
    """main_grad of every parameter, and its flag, after some microbatches under Megatron's DDP."""
    wrapped = in_ddp(model, **ddp)
    for step in range(MICROBATCHES):
        last = step == MICROBATCHES - 1
        tokens, positions, labels = batch(step, cp)
        with torch.enable_grad() if last else wrapped.no_sync():
            uneven(wrapped(tokens, positions, None, labels=labels)).backward()
    flags = {
        f"{name}.grad_added_to_main_grad": p.grad_added_to_main_grad
        for name, p in model.named_parameters()
    }
    wrapped.finish_grad_sync()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, name
        found[name] = parameter.main_grad.clone()
    return {**found, **flags}


def fused(**options: Any) -> dict[str, Any]:
    return {"gradient_accumulation_fusion": True, **options}


BF16 = torch.bfloat16

compared("DDP without fusion", accumulated, {})
compared("fusion: fp32 main_grad, three microbatches", accumulated, fused())
compared("fusion: tied embeddings", accumulated, fused(tied=True))
compared(
    "fusion: bf16 parameters, fp32 main_grad", accumulated,
    fused(bf16=True), fused(bf16=True, tied=True), dtype=BF16,
)  # fmt: skip
compared(
    "fusion: bf16 main_grad", partial(accumulated, grad_reduce_in_fp32=False), fused(bf16=True),
    dtype=BF16,
)  # fmt: skip
compared(
    "fusion: multi-token prediction, several uses of the weight", accumulated,
    fused(mtp=2, tied=True), fused(mtp=2),
)  # fmt: skip
compared(
    "fusion: detached heads", accumulated, fused(mtp=2, mtp_detach_heads=True),
    needs="mtp_detach_heads",
)  # fmt: skip
# The dummies' hooks start the reduction of a bucket, so it must hold dweight by then.
compared(
    "fusion: reduction overlapped with backward",
    partial(accumulated, overlap_grad_reduce=True, bucket_size=1), fused(),
)  # fmt: skip


def fuse_the_head(model: Any) -> Any:
    """Set what DDP would of the output layer, whose main_grad is 1; return its weight."""
    model.output_layer.gradient_accumulation_fusion = True
    weight = model.output_layer.weight
    weight.main_grad = torch.ones(weight.shape)
    weight.grad_added_to_main_grad = False
    return weight


def loss_of(model: Any) -> Tensor:
    tokens, positions, labels = batch()
    return uneven(model(tokens, positions, None, labels=labels))


def dummies(model: Any) -> dict[str, Any]:
    """Autograd gets zeros of main_grad's shape and the input's dtype, or None without a flag."""
    found: dict[str, Any] = {}
    for flagged, zero_out in ((True, True), (True, False), (False, False)):
        weight = fuse_the_head(model)
        weight.grad = None
        weight.zero_out_wgrad = zero_out
        if not flagged:
            del weight.grad_added_to_main_grad
        loss = loss_of(model)
        captured = weight.main_grad
        weight.main_grad = torch.full(weight.shape, 7.0)
        loss.backward()
        grad = weight.grad
        case = f"flagged {flagged}, zero_out_wgrad {zero_out}"
        found[case] = weight.main_grad - 1
        found[f"{case}: captured"] = weight.main_grad is captured
        found[f"{case}: flag"] = getattr(weight, "grad_added_to_main_grad", None)
        found[f"{case}: dummy"] = grad is not None and (grad.dtype, grad.shape)
        assert not zero_out or not grad.any()
    return found


def head_alone(model: Any) -> dict[str, Any]:
    loss_of(model).backward()
    weight = model.output_layer.weight
    embedding = model.embedding.word_embeddings.weight
    flag = weight.grad_added_to_main_grad
    return {"main_grad": weight.main_grad, "flag": flag, "embedding": embedding.grad}


def shard_by_fsdp(model: Any) -> None:
    """Its buffer holds garbage until backward, which overwrites it."""
    weight = fuse_the_head(model)
    del weight.main_grad
    made = torch.full(weight.shape, float("nan"))
    weight.__fsdp_param__ = True
    weight.get_main_grad = lambda: made


compared(
    "fusion: flag, dummy gradient, captured main_grad", dummies, {"bf16": True},
    change=fuse_the_head, dtype=BF16,
)  # fmt: skip
compared(
    "fusion: frozen output layer", head_alone, {},
    change=lambda model: fuse_the_head(model).requires_grad_(False),
)  # fmt: skip
compared("fusion: get_main_grad of Megatron-FSDP", head_alone, {}, change=shard_by_fsdp)
