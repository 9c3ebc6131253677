"""A loss of [B, S, H] whose ranks split S, and its outcome as that of B * S tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flce_dist import linear_cross_entropy
from tests.outcomes import Outcome
from tests.parallel_problem import Problem, joined, rank_step

B = 3
S = 8


def split_by_sequence(call: Any = linear_cross_entropy, *, dtensors: bool = False) -> Any:
    """``call`` as ``rank_step`` takes it: on this rank's part of [B, S, H], which is [B, S / P, H].

    dhidden is then 0 for the tokens of other ranks, and a loss per token is flat.
    """

    def of_part(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
        group = options["tp_group"]
        options = {"sequence_dim": 1, **options, "sequence_parallel": True}
        if "token_weight" in options:
            options["token_weight"] = options["token_weight"].view(B, S)
        part: Tensor = hidden.view(B, S, -1).chunk(group.size(), dim=1)[group.rank()]
        if dtensors:
            mesh = DeviceMesh.from_group(group, "cpu")
            part = DTensor.from_local(part, mesh, [Shard(1)])
            part.register_hook(is_split)
        loss = call(part, weight, labels.view(B, S), **options)
        assert loss.shape in ((), (B, S))
        return loss.flatten() if loss.dim() else loss

    return of_part


def is_split(dhidden: Tensor) -> None:
    assert isinstance(dhidden, DTensor) and dhidden.placements == (Shard(1),)
    assert dhidden.shape[:2] == (B, S)


def step_rank(group: Any, problem: Problem, kind: str = "", **options: Any) -> Outcome:
    call: Any = linear_cross_entropy
    if kind == "compiled":
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    call = split_by_sequence(call, dtensors=kind == "dtensors")
    return rank_step(group, problem, call=call, **options)


def whole(ranks: list[Outcome]) -> Outcome:
    found = joined(ranks, sequence_parallel=True)
    return found.changed(dhidden=found.dhidden.view(len(ranks), B * S, -1).sum(0))
