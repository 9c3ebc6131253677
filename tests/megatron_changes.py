"""What may sit on Megatron's output layer: changes of a model, and a count of what the layer does.

Each change is a function of the model; it returns what undoes it for other models, or None.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from tests.contract.models import H


class Counts:
    calls = 0  # of the output layer as a module
    logits = 0  # of them, those that multiplied all of the weight


@contextlib.contextmanager
def counted(layer: nn.Module) -> Iterator[Counts]:
    """Count what the output layer does."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    counts = Counts()
    forward = ColumnParallelLinear.forward

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts.logits += self is layer
        return forward(self, *args, **kwargs)

    def called(module: Any, args: Any) -> None:
        counts.calls += 1

    handle = layer.register_forward_pre_hook(called)
    with mock.patch.object(ColumnParallelLinear, "forward", noted):
        yield counts
    handle.remove()


def of_all_modules(register: Callable[..., Any]) -> Callable[[Any], Any]:
    """A hook of all modules that acts on the output layer."""

    def change(model: Any) -> Any:
        layer = model.output_layer

        def doubled(module: Any, args: Any, *results: Any) -> Any:
            if module is not layer:
                return None
            if not results:
                return (2.0 * args[0], *args[1:])
            ((logits, bias),) = results
            return 2.0 * logits, bias

        return register(doubled).remove

    return change


def scaled_gradient(module: Any, grad_input: Any, grad_output: Any = None) -> Any:
    return tuple(None if g is None else 3.0 * g for g in grad_input)


def of_all_gradients(model: Any) -> Any:
    layer = model.output_layer

    def hook(module: Any, grad_input: Any, grad_output: Any) -> Any:
        return scaled_gradient(module, grad_input) if module is layer else None

    return hooks_of_all.register_module_full_backward_hook(hook).remove


def patched(model: Any) -> None:
    forward = model.output_layer.forward

    @functools.wraps(forward)
    def halved(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        logits, bias = forward(0.5 * x, *args, **kwargs)
        return logits.clamp(max=1.0), bias

    model.output_layer.forward = halved


def patched_as_a_method(model: Any) -> None:
    forward = model.output_layer.forward

    @functools.wraps(forward.__func__)
    def halved(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(0.5 * x, *args, **kwargs)

    model.output_layer.forward = types.MethodType(halved, model.output_layer)


def converted(model: Any) -> None:
    """As ModelOpt converts a layer: a subclass of its class that changes what it returns."""
    base = type(model.output_layer)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits, bias = base.forward(self, *args, **kwargs)
        return logits.round(decimals=1) + logits - logits.detach(), bias

    model.output_layer.__class__ = type(f"Quant{base.__name__}", (base,), {"forward": forward})


class LoRALinear(nn.Module):
    """As Megatron-Bridge wraps a layer: no weight of its own, and base and adapter are added."""

    def __init__(self, to_wrap: Any) -> None:
        super().__init__()
        rows = to_wrap.weight.shape[0]
        self.to_wrap = to_wrap
        self.adapter = nn.Sequential(nn.Linear(H, 4, bias=False), nn.Linear(4, rows, bias=False))
        generator = torch.Generator().manual_seed(7)
        for parameter in self.adapter.parameters():
            parameter.data.normal_(std=0.3, generator=generator)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        logits, bias = self.to_wrap(x, *args, **kwargs)
        added = self.adapter(x)
        return logits + added, bias


def wrapped(model: Any) -> None:
    model.output_layer = LoRALinear(model.output_layer)


def with_another_loss(model: Any) -> None:
    """As Megatron's saver of logits replaces the loss."""

    def loss(model: Any, labels: Tensor, logits: Tensor) -> Tensor:
        return (logits * logits).sum(dim=-1).transpose(0, 1).contiguous()

    model.compute_language_model_loss = types.MethodType(loss, model)


def hooked(model: Any) -> None:
    model.output_layer.register_forward_hook(lambda _, args, found: (0.5 * found[0], found[1]))


def pre_hooked(model: Any) -> None:
    model.output_layer.register_forward_pre_hook(lambda _, args: (1.5 * args[0], *args[1:]))


def hooked_by_megatrons_training(model: Any) -> None:
    """Not all hooks from Megatron are those of its parameters' owners."""

    def doubled(module: Any, args: Any, found: Any) -> Any:
        return 2.0 * found[0], found[1]

    doubled.__module__ = "megatron.training.distillation.cached_logits_loss"
    model.output_layer.register_forward_hook(doubled)


def gradient_hooked(model: Any) -> None:
    model.output_layer.register_full_backward_hook(scaled_gradient)


def gradient_pre_hooked(model: Any) -> None:
    model.output_layer.register_full_backward_pre_hook(scaled_gradient)


READERS: dict[str, Any] = {
    "a hook": hooked,
    "a hook of megatron.training": hooked_by_megatrons_training,
    "a hook of all modules": of_all_modules(hooks_of_all.register_module_forward_hook),
    "a hook of its gradient": gradient_hooked,
    "a hook of the logits' gradient": gradient_pre_hooked,
    "a hook of all modules' gradients": of_all_gradients,
    "a patched forward": patched,
    "a patched method": patched_as_a_method,
    "a converted class": converted,
    "a wrapper": wrapped,
    "another loss": with_another_loss,
}
NO_READERS: dict[str, Any] = {
    "nothing": lambda model: None,
    "a pre-hook": pre_hooked,
    "a pre-hook of all modules": of_all_modules(hooks_of_all.register_module_forward_pre_hook),
}
BEFORE = ("nothing", "a pre-hook", "a hook", "a hook of its gradient")  # what may be there already
CHANGES = NO_READERS | READERS
