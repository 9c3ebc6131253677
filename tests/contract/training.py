"""Lines of the contract: Megatron's optimizer, schedules, parallelism and checkpoints."""

import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flce_dist.launch.train.optimizer import OnCpu
from flce_dist.megatron import use_linear_cross_entropy
from tests.contract.compare import BUDGET, compare, compared, line
from tests.contract.main_grad import MICROBATCHES, accumulated, fused
from tests.contract.models import Setting, batch, gpt, in_ddp, uneven


def stepped(model: Any) -> dict[str, Any]:
    """How two steps change each parameter; its gathers overlap with forward."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with OnCpu():
        overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
        wrapped = in_ddp(model, use_distributed_optimizer=True, bucket_size=1, **overlap)
        config = OptimizerConfig(
            optimizer="adam", lr=0.01, clip_grad=1.0, bf16=model.config.bf16,
            params_dtype=model.config.params_dtype, use_distributed_optimizer=True,
            overlap_param_gather=True,
        )  # fmt: skip
        optimizer = get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for step in range(2):
            wrapped.zero_grad_buffer()
            tokens, positions, labels = batch(step)
            uneven(wrapped(tokens, positions, None, labels=labels)).backward()
            wrapped.finish_grad_sync()
            done, norm, _ = optimizer.step()
            assert done
        moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    return {"norm of the gradient": torch.as_tensor(norm), **moved}


compared("distributed optimizer, two steps", stepped, fused(tied=True))
compared(
    "context parallelism, with multi-token prediction", partial(accumulated, cp=2),
    fused(tied=True, mtp=1, cp=2),
)  # fmt: skip


def scheduled(model: Any) -> dict[str, Any]:
    """Losses and main_grads of this stage after Megatron's 1F1B schedule."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses = []

    def step(batches: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        tokens, positions, labels = next(batches)
        output = model(tokens, positions, None, labels=labels)

        def reduced(loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            losses.append(loss.detach().clone())
            return uneven(loss), {}

        return output, reduced

    with OnCpu():
        wrapped = in_ddp(model)
        model.config.finalize_model_grads_func = finalize_model_grads
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=map(batch, range(MICROBATCHES)),
            model=wrapped,
            num_microbatches=MICROBATCHES,
            seq_length=batch()[0].shape[1],
            micro_batch_size=batch()[0].shape[0],
        )
    assert len(losses) == (MICROBATCHES if model.post_process else 0)
    found: dict[str, Any] = {f"loss {i}": loss for i, loss in enumerate(losses)}
    for name, parameter in model.named_parameters():
        found[name] = parameter.main_grad.clone()
        if name == "output_layer.weight" and model.config.mtp_num_layers:
            found[name] = bool(found[name].any())  # unused: the last stage has an embedding
    return found


# Untied, tied, and tied with multi-token prediction; the head is on the last stage.
compared(
    "pipeline parallelism, 1F1B", scheduled,
    fused(pp=2), fused(pp=2, tied=True), fused(pp=2, tied=True, mtp=1),
)  # fmt: skip


def layout(model: Any) -> dict[str, Any]:
    """What ``sharded_state_dict`` says of each tensor: what a distributed checkpoint contains."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group}
    found: dict[str, Any] = {}
    for name, entry in model.sharded_state_dict(metadata=metadata).items():
        found[name] = type(entry).__name__
        if isinstance(entry, ShardedTensor):
            shapes = entry.local_shape, entry.global_shape, entry.global_offset
            more = entry.replica_id, entry.allow_shape_mismatch
            found[name] = entry.key, entry.dtype, *shapes, *more
            found[f"{name}: values"] = entry.data
    return {**found, "names": list(model.state_dict())}


compared("sharded_state_dict", layout, {"tied": False}, {"tied": True})


@line("checkpoints in both directions")
def checkpoints(at: Setting) -> float:
    """A step, a checkpoint, and a step of the other kind of model, with the plug-in or without."""

    def step(model: Any, optimizer: Any) -> None:
        tokens, positions, labels = batch()
        optimizer.zero_grad()
        uneven(model(tokens, positions, None, labels=labels)).backward()
        optimizer.step()

    def continued(first: bool, second: bool) -> dict[str, Any]:
        file = io.BytesIO()
        for plugged in (first, second):
            model = use_linear_cross_entropy(gpt(at)) if plugged else gpt(at)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            if file.tell():
                file.seek(0)
                saved = torch.load(file, weights_only=False)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            step(model, optimizer)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        return {name: p.detach() for name, p in model.named_parameters()}

    expected = continued(False, False)
    both = (continued(first, not first) for first in (True, False))
    return max(compare(found, expected, BUDGET[torch.float32]) for found in both)
