"""Lines of the contract: gradient_accumulation_fusion, and Megatron's DDP."""

from typing import Any

import torch
from torch import Tensor

from tests.contract.compare import against_megatron, compared, line
from tests.contract.models import Setting, batch, gpt, uneven

MICROBATCHES = 3


def accumulated(model: Any, cp: int = 1, **ddp: Any) -> dict[str, Any]:
    """main_grad of every parameter, and its flag, after some microbatches under Megatron's DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **ddp})
    stage = Float16Module(model.config, model) if model.config.bf16 else model
    wrapped = DistributedDataParallel(model.config, config, stage)
    wrapped.zero_grad_buffer()
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


def accumulated_in_bf16(model: Any) -> dict[str, Any]:
    found = accumulated(model, grad_reduce_in_fp32=False)
    assert found["output_layer.weight"].dtype == torch.bfloat16
    return found


def accumulated_and_reduced(model: Any) -> dict[str, Any]:
    """The dummies' hooks start the reduction of a bucket, so it must hold dweight by then."""
    return accumulated(model, overlap_grad_reduce=True, bucket_size=1)


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
compared("fusion: bf16 main_grad", accumulated_in_bf16, fused(bf16=True), dtype=BF16)
compared(
    "fusion: multi-token prediction, several uses of the weight", accumulated,
    fused(mtp=2, tied=True), fused(mtp=2),
)  # fmt: skip
compared(
    "fusion: detached heads", accumulated, fused(mtp=2, mtp_detach_heads=True),
    needs="mtp_detach_heads",
)  # fmt: skip
compared("fusion: reduction overlapped with backward", accumulated_and_reduced, fused())


def prepared(weight: Any, flagged: bool = True) -> Any:
    """Set the attributes of a parameter that DDP would."""
    weight.main_grad, weight.grad = torch.ones(weight.shape), None
    if flagged:
        weight.grad_added_to_main_grad = False
    elif hasattr(weight, "grad_added_to_main_grad"):
        del weight.grad_added_to_main_grad
    return weight


def loss_of(model: Any) -> Tensor:
    tokens, positions, labels = batch()
    return uneven(model(tokens, positions, None, labels=labels))


@line("fusion: flag, dummy gradient, captured main_grad")
def dummies(at: Setting) -> float:
    """Autograd gets zeros of main_grad's shape and the input's dtype, or None without a flag."""

    def build() -> Any:
        model = gpt(at, bf16=True)
        model.output_layer.gradient_accumulation_fusion = True
        return model

    def run(model: Any) -> dict[str, Any]:
        weight, found = model.output_layer.weight, {}
        for flagged, zero_out in ((True, True), (True, False), (False, False)):
            prepared(weight, flagged).zero_out_wgrad = zero_out
            loss = loss_of(model)
            captured, weight.main_grad = weight.main_grad, torch.full(weight.shape, 7.0)
            loss.backward()
            grad, case = weight.grad, f"flagged {flagged}, zero_out_wgrad {zero_out}"
            found[case] = weight.main_grad - 1
            found[f"{case}: captured"] = weight.main_grad is captured
            found[f"{case}: flag"] = getattr(weight, "grad_added_to_main_grad", None)
            found[f"{case}: dummy"] = grad is not None and (grad.dtype, grad.shape)
            assert not zero_out or not grad.any()
        return found

    return against_megatron(build, run, dtype=torch.bfloat16)


@line("fusion: frozen output layer")
def fused_frozen(at: Setting) -> float:
    def build() -> Any:
        model = gpt(at)
        model.output_layer.gradient_accumulation_fusion = True
        prepared(model.output_layer.weight).requires_grad_(False)
        return model

    def run(model: Any) -> dict[str, Any]:
        loss_of(model).backward()
        weight = model.output_layer.weight
        flag = weight.grad_added_to_main_grad
        embedding = model.embedding.word_embeddings.weight.grad
        return {"main_grad": weight.main_grad, "flag": flag, "embedding": embedding}

    return against_megatron(build, run)


@line("fusion: get_main_grad of Megatron-FSDP")
def fsdp(at: Setting) -> float:
    """Its buffer holds garbage until backward, which overwrites it."""

    def build() -> Any:
        model = gpt(at)
        model.output_layer.gradient_accumulation_fusion = True
        weight = prepared(model.output_layer.weight)
        del weight.main_grad
        made = torch.full(weight.shape, float("nan"))
        weight.__fsdp_param__, weight.get_main_grad = True, lambda: made
        return model

    def run(model: Any) -> dict[str, Any]:
        loss_of(model).backward()
        weight = model.output_layer.weight
        flag = weight.grad_added_to_main_grad
        return {"main_grad": weight.main_grad, "flag": flag}

    return against_megatron(build, run)
