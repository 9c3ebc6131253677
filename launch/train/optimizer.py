"""Megatron's distributed optimizer: AdamW on fp32 shards, each rank's its own."""

import math
from typing import Any

import torch
from torch import Tensor

from flce_dist.launch.train.config import OptimizerConfig
from flce_dist.launch.train.cpu import optimizer_names


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
        parameters: this rank's parameters by name, the same on all copies of the weights.
        shards: what this rank updates of them, flat and in fp32: views of fp32 parameters, copies
            of bf16 ones. A name may be missing where other copies hold all of it.
        adamw: PyTorch's optimizer over the shards.
    """

    def __init__(self, model: Any, config: OptimizerConfig, device: torch.device):
        from megatron.core import optimizer as megatron

        self.config, self.device = config, device
        self.parameters = dict(model.module.named_parameters())
        dtype = next(iter(self.parameters.values())).dtype
        megatron.clip_grads.l2_norm_impl = _norm
        with optimizer_names(device):
            self.megatron = megatron.get_megatron_optimizer(
                megatron.OptimizerConfig(
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                    adam_beta1=config.beta1,
                    adam_beta2=config.beta2,
                    clip_grad=config.clip_norm,
                    bf16=dtype == torch.bfloat16,
                    params_dtype=dtype,
                    use_distributed_optimizer=True,
                ),
                [model],
                use_gloo_process_groups=False,
            )
        (distributed,) = self.megatron.chained_optimizers
        names = {parameter: name for name, parameter in self.parameters.items()}
        self.shards: dict[str, Tensor] = {}
        for whole, shards in (
            (distributed.model_fp32_groups, distributed.shard_fp32_groups),
            (distributed.model_float16_groups, distributed.shard_fp32_from_float16_groups),
        ):
            for group, group_shards in zip(whole, shards, strict=True):
                self.shards |= {names[p]: x for p, x in zip(group, group_shards, strict=True)}
        self.adamw: torch.optim.Optimizer = distributed.optimizer
        for group in self.adamw.param_groups:
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        # What AdamW would create at its first step, so that a checkpoint has where to load into.
        for shard in self.shards.values():
            self.adamw.state[shard] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }

    def step(self, step: int) -> float:
        """Clip the finished gradients and update the parameters; return the gradient norm.

        Collective: one all-reduce of the norm, and an all-gather of the parameters among copies.
        """
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(step, self.config)
        with optimizer_names(self.device):
            _, norm, _ = self.megatron.step()
            self.megatron.zero_grad()
        return float(norm)


def _norm(chunk: int, overflow: Tensor, grads: list[list[Tensor]], each: bool) -> Any:
    """Megatron's own, where APEX is not installed, reads the norm of each tensor on the host."""
    return torch.nn.utils.get_total_norm(grads[0])[None], None
