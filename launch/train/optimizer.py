"""Gradients summed over ranks, clipped, and AdamW on fp32 weights.

Megatron's own optimizer needs GPUs; this one does the same arithmetic anywhere, plainly.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce_dist.launch.train.config import OptimizerConfig
from flce_dist.launch.train.model import Groups


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """Rate of the ``step``-th update, counted from 1: linear warmup, cosine decay, then flat."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.decay_steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.min_lr + (config.lr - config.min_lr) * cosine


class Optimizer:
    """AdamW over fp32 masters of the model's parameters (an fp32 parameter is its own master)."""

    def __init__(self, model: nn.Module, groups: Groups, config: OptimizerConfig):
        self.config = config
        self.groups = groups
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.masters: dict[str, Tensor] = {
            name: p if p.dtype == torch.float32 else p.detach().float()
            for name, p in self.parameters.items()
        }
        matrices = [master for master in self.masters.values() if master.ndim > 1]
        vectors = [master for master in self.masters.values() if master.ndim <= 1]
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(config.beta1, config.beta2),
        )
        # What AdamW would create at its first step, so that a checkpoint has where to load into.
        for master in self.masters.values():
            self.adamw.state[master] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def step(self, step: int) -> float:
        """Update the parameters from their gradients and drop those; return the gradient norm.

        Collective: one all-reduce over the tensor-parallel group per norm weight (sequence
        parallelism), one over the data-parallel group per parameter, and one of a scalar.
        """
        for name, parameter in self.parameters.items():
            grad = parameter.grad
            assert grad is not None, f"{name} got no gradient"
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(grad, group=self.groups.tensor)
            master = self.masters[name]
            master.grad = grad if grad.dtype == torch.float32 else grad.float()
            dist.all_reduce(master.grad, group=self.groups.data)
            master.grad /= self.groups.data.size()
        norm = self._clip()
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(step, self.config)
        self.adamw.step()
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter:
                parameter.data.copy_(master)
            parameter.grad = master.grad = None
        return norm

    def _clip(self) -> float:
        """Scale gradients to ``clip_norm`` where their norm over all shards is larger."""
        grads = {name: master.grad for name, master in self.masters.items()}
        sharded, replicated = torch.zeros(2, device=next(iter(self.masters.values())).device)
        for name, grad in grads.items():
            assert grad is not None
            if is_sharded(self.parameters[name]):
                sharded += grad.square().sum()
            else:
                replicated += grad.square().sum()
        dist.all_reduce(sharded, group=self.groups.tensor)
        norm = float((sharded + replicated).sqrt())
        scale = self.config.clip_norm / (norm + 1e-6)
        if scale < 1.0:
            for grad in grads.values():
                assert grad is not None
                grad *= scale
        return norm


def is_sharded(parameter: Tensor) -> bool:
    """Whether megatron-core split this parameter over the tensor-parallel group."""
    return bool(getattr(parameter, "tensor_model_parallel", False))
