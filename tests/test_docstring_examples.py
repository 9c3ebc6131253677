"""Every public function has an example in its docstring, which runs as it is printed."""

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flce_dist
from flce_dist import divergence, filtered, testing
from flce_dist.testing import run_ranks
from tests.docstring_examples import run_example

T, H, V = 16, 64, 1000

ON_RANKS = {"LinearCrossEntropy", "data_parallel_linear_cross_entropy", "teacher_shard"}


def public_functions() -> dict[str, Any]:
    """Those of the package and of the modules that a user imports beside; classes by name."""
    found = {name: getattr(flce_dist, name) for name in flce_dist.__all__}
    found |= {name: getattr(filtered, name) for name in filtered.__all__}
    functions = {name: x for name, x in found.items() if inspect.isfunction(x)}
    others = (
        flce_dist.LinearCrossEntropy,
        divergence.teacher_shard,
        testing.run_ranks,
        testing.error_budget,
        testing.RankPool,
    )
    return functions | {x.__name__: x for x in others}


FUNCTIONS = public_functions()


def names_of_a_call() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    ids = torch.randint(V, (T,), generator=generator)
    logits = random(T, V)
    return {
        "torch": torch,
        **FUNCTIONS,
        "filtered": filtered,
        "hidden": random(T, H).requires_grad_(),
        "weight": random(V, H).requires_grad_(),
        "labels": ids,
        "ids": ids,
        "ids_of_text": ids,
        "chosen": ids,
        "rejected": ids.roll(1),
        "teacher_hidden": random(T, 32),
        "teacher_weight": random(V, 32),
        "logits": logits,
        "mine": logits.logsumexp(-1),
    }


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_example(name: str, capsys: Any) -> None:
    function = FUNCTIONS[name]
    if name not in ON_RANKS:
        given = names_of_a_call()
        made = run_example(function, **given)
        assert made.keys() > given.keys() or capsys.readouterr().out
        return

    def rank(group: dist.ProcessGroup) -> int:
        given = names_of_a_call()
        of_shard = given["teacher_weight"][group.rank() * V // 2 :][: V // 2]
        groups = {"tp_group": group, "data_group": group}
        if name == "teacher_shard":
            given |= {"teacher_weight": of_shard, "vocab_size": V}
        return len(run_example(function, **given, **groups)) - len(given)

    assert all(new > 2 for new in run_ranks(rank, 2))


def test_what_examples_say() -> None:
    made = run_example(flce_dist.vocab_range, **names_of_a_call())
    assert (made["start"], made["end"]) == (381, 507)
    losses = run_example(testing.run_ranks, **names_of_a_call())["losses"]
    assert len(losses) == 4 and all(torch.equal(loss, losses[0]) for loss in losses)
