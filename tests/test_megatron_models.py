"""The plug-in in the development branch of megatron-core."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from flce_dist.launch.train.model import token_losses
from flce_dist.megatron import use_linear_cross_entropy
from flce_dist.testing import RankPool
from tests.megatron_models import (
    as_megatron_has_it,
    batch,
    build,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def development_layer() -> Any:
    """The development branch's layer; in a release, a subclass in its place."""
    import megatron.core.transformer as parent
    from megatron.core.tensor_parallel import ColumnParallelLinear

    name = "megatron.core.transformer.linear_cross_entropy"
    if find_spec(name) is not None:
        return import_module(name).LinearCrossEntropyModule

    class LinearCrossEntropyModule(ColumnParallelLinear):
        def forward(self, input_, weight=None, runtime_gather_output=None, **of_loss):
            assert not of_loss
            return super().forward(input_, weight, runtime_gather_output)

    LinearCrossEntropyModule.__module__ = name
    sys.modules[name] = module = ModuleType(name)
    vars(module)["LinearCrossEntropyModule"] = LinearCrossEntropyModule
    vars(parent)["linear_cross_entropy"] = module
    return LinearCrossEntropyModule


def rank_development_branch(group: Any) -> None:
    """Its layer is a subclass that can return a loss itself."""
    LinearCrossEntropyModule = development_layer()
    model = as_megatron_has_it(build(2, sp=True, tied=False)[0])
    model.output_layer.__class__ = LinearCrossEntropyModule
    layer = use_linear_cross_entropy(model).output_layer
    assert type(layer).__name__ == "LinearCrossEntropyModule"
    assert isinstance(layer, LinearCrossEntropyModule)
    lazily = token_losses(model, *batch())
    hidden: list[Tensor] = []

    def catch(layer: Any, args: Any, kwargs: Any) -> None:
        hidden.append(args[0] if args else kwargs["input_"])

    handle = layer.register_forward_pre_hook(catch, with_kwargs=True)
    token_losses(model, *batch())
    handle.remove()
    fused = layer(hidden[0], output_cross_entropy_loss=True, labels=batch()[1])
    assert torch.equal(fused, lazily)
    total = layer(hidden[0], output_cross_entropy_loss=True, labels=batch()[1], reduction="sum")
    torch.testing.assert_close(total, lazily.sum())
    assert type(layer(hidden[0])[0]) is Tensor


def test_the_layer_of_the_development_branch(ranks: RankPool) -> None:
    ranks.run(rank_development_branch)
