"""Megatron's distributed optimizer: AdamW on fp32 shards, each rank's its own."""

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flce_dist.launch.program import RunError
from flce_dist.launch.train.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """Rate of the ``step``-th update, counted from 1: linear warmup, cosine decay, then flat."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.decay_steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.min_lr + (config.lr - config.min_lr) * cosine


class Optimizer:
    """Megatron's optimizer over a model in Megatron's DDP, with a learning rate for each step.

    Attributes:
        parameters: this rank's parameters by name, the same on all data-parallel replicas.
        adamw: PyTorch's optimizer of what this rank updates of them: flat shards in fp32, views of
            fp32 parameters and copies of bf16 ones.
    """

    def __init__(self, model: Any, config: OptimizerConfig, device: torch.device):
        from megatron.core import optimizer as megatron

        self.config = config
        self._on_device = nullcontext() if device.type == "cuda" else OnCpu()
        self.parameters = dict(model.module.named_parameters())
        dtype = next(iter(self.parameters.values())).dtype
        megatron.clip_grads.l2_norm_impl = _norm
        with self._on_device:
            settings = megatron.OptimizerConfig(
                lr=config.lr, weight_decay=config.weight_decay, clip_grad=config.clip_norm,
                adam_beta1=config.beta1, adam_beta2=config.beta2, params_dtype=dtype,
                bf16=dtype == torch.bfloat16, use_distributed_optimizer=True,
            )  # fmt: skip
            self.megatron = megatron.get_megatron_optimizer(
                settings, [model], use_gloo_process_groups=False
            )
        (distributed,) = self.megatron.chained_optimizers
        self.adamw: torch.optim.Optimizer = distributed.optimizer
        for group in self.adamw.param_groups:
            group["weight_decay"] = config.weight_decay * group["wd_mult"]

    def step(self, step: int) -> float:
        """Clip the finished gradients and update the parameters; return the gradient norm.

        Collective: one all-reduce of the norm, and an all-gather of the parameters over replicas.
        """
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(step, self.config)
        with self._on_device:
            _, norm, _ = self.megatron.step()
            self.megatron.zero_grad()
        return float(norm)

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's parameters by their names in a checkpoint, no copies."""
        return {f"model.{name}": x.detach() for name, x in self.parameters.items()}

    def state(self) -> dict[str, Tensor]:
        """Return this rank's shards and what AdamW knows of them; no other rank holds it."""
        shards = [shard for group in self.adamw.param_groups for shard in group["params"]]
        return {
            f"optimizer.{i}.{key}": value.detach()
            for i, shard in enumerate(shards)
            for key, value in {"fp32": shard, **self.adamw.state[shard]}.items()
        }

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Take over ``weights`` and ``state`` of an earlier process.

        Raises ``RunError`` if names or shapes are those of another model.
        """
        mine = self.weights() | self.state()
        shapes, others = (
            {
                name: (x.shape, x.dtype)
                for name, x in tensors.items()
                if name.startswith("model.") or name.endswith(".fp32")
            }
            for tensors in (mine, saved)
        )
        if shapes != others:
            names = sorted({name for name, _ in shapes.items() ^ others.items()})
            raise RunError(
                f"the checkpoint was made for another model, which differs in "
                f"{', '.join(names[:5])}; use the package versions that it was made with"
            )
        moments: dict[int, dict[str, Tensor]] = {}
        for name, x in saved.items():
            if name in shapes:
                mine[name].copy_(x)
            else:
                _, i, key = name.split(".")
                moments.setdefault(int(i), {})[key] = x
        self.adamw.load_state_dict(self.adamw.state_dict() | {"state": moments})


def _norm(chunk: int, overflow: Tensor, grads: list[list[Tensor]], each: bool) -> Any:
    """Megatron's own, where APEX is not installed, reads the norm of each tensor on the host."""
    return torch.nn.utils.get_total_norm(grads[0])[None], None


class OnCpu(TorchFunctionMode):
    """Tensors that Megatron makes for, or moves to, "cuda" are on the CPU, and say they are not."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        is_name = func is Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.", 1) if is_name else result
