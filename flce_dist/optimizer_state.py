"""The state of an optimizer whose parameters hold a shard of the vocabulary.

Its state dict has DTensors of all rows, as the layer's has, so ``torch.distributed.checkpoint``
saves the moments of every rank. In use the state is plain, of this rank's rows.
"""

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flce_dist import state_dtensors

if TYPE_CHECKING:
    from flce_dist.vocab_shard import VocabShard

_shards: "weakref.WeakSet[VocabShard]" = weakref.WeakSet()
_examined: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers that have stepped, and their number of parameter groups then."""
_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch(shard: "VocabShard") -> None:
    """Let optimizers of this shard's parameters have whole state dicts, from their first step on.

    There is no state to save before.
    """
    _shards.add(shard)
    _let_steps_be_seen()


@functools.cache
def _let_steps_be_seen() -> None:
    # Compiled steps, too. As a decorator this would import all of torch.compile with the package.
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    n_groups = len(optimizer.param_groups)
    if _examined.get(optimizer) == n_groups:
        return
    owners = _owners()
    _examined[optimizer] = n_groups
    for parameter in _parameters(optimizer):
        shard = owners.get(id(parameter))
        if shard is None:
            continue
        if parameter in optimizer.state:  # loaded before the first step
            state = optimizer.state[parameter]
            state.update(_own_state(shard, parameter, state))
        if optimizer not in _hooked:
            optimizer.register_state_dict_post_hook(_whole)
            optimizer.register_load_state_dict_pre_hook(_own)
            _hooked.add(optimizer)


def _owners() -> "dict[int, VocabShard]":
    """Return the shard of each of its parameters, by the parameter's id."""
    shards = list(_shards)  # ranks may be threads
    return {id(x): shard for shard in shards for x in shard.parameters(recurse=False)}


def _whole(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with a DTensor of all rows for each state of a parameter's shape."""
    return _with_states(optimizer, state_dict, _whole_state)


def _own(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with this rank's rows of what it has of all."""
    return _with_states(optimizer, state_dict, _own_state)


def _with_states(
    optimizer: Optimizer, state_dict: dict[str, Any], state_of: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """Return the state dict with what ``state_of`` makes of the states of shards' parameters."""
    owners = _owners()
    states = dict(state_dict["state"])
    for name, parameter in _named(optimizer, state_dict):
        shard = owners.get(id(parameter))
        if shard is not None and name in states:
            states[name] = state_of(shard, parameter, states[name])
    return {**state_dict, "state": states}


def _named(optimizer: Optimizer, state_dict: dict[str, Any]) -> list[tuple[Any, Tensor]]:
    """Return each parameter with what the state dict calls it; torch compares their numbers."""
    names = (name for group in state_dict["param_groups"] for name in group["params"])
    return list(zip(names, _parameters(optimizer), strict=False))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _whole_state(shard: "VocabShard", parameter: Tensor, state: Any) -> dict[str, Any]:
    return {key: _whole_of(key, x, shard, parameter) for key, x in state.items()}


def _whole_of(key: str, x: Any, shard: "VocabShard", parameter: Tensor) -> Any:
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    if x.shape != parameter.shape:
        raise NotImplementedError(
            f"an optimizer's state must have its parameter's shape {tuple(parameter.shape)}, or be "
            f"a number, to be saved with a tp_group, got {key!r} of {tuple(x.shape)}, which is of "
            "this rank's rows alone: use an optimizer with a state for each element, as AdamW has, "
            "or save optimizer.state of each rank in a file of its own"
        )
    assert shard.tp_group is not None
    return state_dtensors.whole_of_rows(x, shard.padded_vocab_size, shard.tp_group)


def _own_state(shard: "VocabShard", parameter: Any, state: Any) -> dict[str, Any]:
    return {
        key: shard.own_part(x, parameter) if isinstance(x, Tensor) and x.dim() else x
        for key, x in state.items()
    }
