"""torch.compile keeps the op whole on two ranks, and the order of its collectives."""

import itertools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint

from flce_dist import linear_cross_entropy
from flce_dist.state_dtensors import local_part
from flce_dist.testing import relative_rms
from tests.meshes import ROWS, SPLIT, WHOLE, mesh_of, operands
from tests.parallel_checks import layered
from tests.parallel_problem import UNEVEN, Problem, rank_step
from tests.problems import SCHEDULES
from tests.test_compiled import forget_what_was_compiled

__all__ = ["forget_what_was_compiled"]  # a fixture


def plain_step(
    group: dist.ProcessGroup, compiles: Any, problem: Problem, **options: Any
) -> list[Tensor]:
    call = compiles(linear_cross_entropy, backend="aot_eager")
    return rank_step(group, problem, call=call, **options).tensors()


def dtensor_step(group: dist.ProcessGroup, compiles: Any, sequence_parallel: bool) -> list[Tensor]:
    of_hidden = SPLIT if sequence_parallel else WHOLE
    hidden, weight, bias, labels = operands(mesh_of(2), UNEVEN, hidden=of_hidden, **ROWS).values()

    def step(hidden, weight, bias):
        return linear_cross_entropy(
            hidden, weight, labels, bias=bias, tp_group=group, sequence_parallel=sequence_parallel
        )

    loss = compiles(step, backend="aot_eager")(hidden, weight, bias)
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    return [loss.detach(), *(local_part(x)[0] for x in gradients)]


def two_heads(layer, hidden, weight, bias):
    return layer(hidden, weight, bias) + layer(hidden / 2, -weight, bias)


def two_heads_step(group: dist.ProcessGroup, compiles: Any) -> list[Tensor]:
    """By inductor. Graphs of ranks differ in sizes; the order of their collectives must not."""
    call = layered(compiles(two_heads))
    options: dict[str, Any] = {"sequence_parallel": True, "schedule": "cached"}
    return rank_step(group, UNEVEN, call=call, **options).tensors()


def orders(group: dist.ProcessGroup) -> list[list[str]]:
    """The names of operators of two heads in the order that their tokens give, of each graph."""
    torch._dynamo.reset()
    chains: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls = [x for x in graph.graph.nodes if "with_effects" in str(x.target)]
        for before, after in itertools.pairwise(calls):
            token = after.args[0]
            assert token.target is operator.getitem and token.args == (before, 0)
        chains.append([str(x.args[1]) for x in calls])
        return make_boxed_func(graph)

    def compiles(step: Any) -> Any:
        return torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=note))

    options: dict[str, Any] = {"sequence_parallel": True, "schedule": "cached"}
    rank_step(group, UNEVEN, call=layered(compiles(two_heads)), **options)
    return chains


def test_collectives_of_two_heads_have_an_order(ranks):
    """Each operator takes a token from the one before."""
    expected = [[f"flce_dist.{name}_on_ranks.default"] * 2 for name in ("forward", "backward")]
    assert ranks.run(orders) == [expected] * 2


def behind_a_checkpoint(layer, hidden, weight, bias):
    body = checkpoint(lambda x: x.sin().cos(), hidden, use_reentrant=False)
    return layer(body, weight, bias)


def checkpoint_step(group: dist.ProcessGroup, compiles: Any) -> list[Tensor]:
    call = layered(compiles(behind_a_checkpoint, backend="aot_eager"))
    return rank_step(group, UNEVEN, call=call).tensors()


STEPS: dict[str, Callable[..., list[Tensor]]] = {
    "behind a checkpoint": checkpoint_step,
    "uneven": partial(plain_step, problem=UNEVEN),
    "uneven, SP": partial(plain_step, problem=UNEVEN, sequence_parallel=True),
    **{  # rank 1 has no rows
        f"one row, {name}": partial(plain_step, problem=Problem(V_all=1), schedule=name)
        for name in SCHEDULES
    },
    "DTensors": partial(dtensor_step, sequence_parallel=False),
    "DTensors, SP": partial(dtensor_step, sequence_parallel=True),
    "two heads": two_heads_step,
}


def step_rank(group: dist.ProcessGroup, name: str, compiles: bool) -> list[Tensor]:
    torch._dynamo.reset()
    compiler = partial(torch.compile, fullgraph=True) if compiles else lambda step, **_: step
    return STEPS[name](group, compiler)


@pytest.mark.parametrize("name", STEPS)
def test_two_ranks(ranks, name):
    pairs = (ranks.run(step_rank, name, compiles) for compiles in (True, False))
    for ours, expected in zip(*pairs, strict=True):
        for mine, right in zip(ours, expected, strict=True):
            assert relative_rms(mine, right) <= (1e-6 if name == "two heads" else 0.0)
