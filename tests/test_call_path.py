"""How many modules a reader passes who follows one call: those whose functions it executes.

A warm sequence-parallel call, eager, on 2 gloo ranks; kernels are not counted.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flce_dist import linear_cross_entropy

FORWARD = {"recompute": 11, "cached": 11, "auto": 11, "in_forward": 13, "filtered": 11}
BACKWARD = {"recompute": 9, "cached": 9, "auto": 9, "in_forward": 3, "filtered": 9}


def modules_of(run: Callable[[], Any]) -> list[str]:
    """Modules of flce_dist outside of kernels/ that execute a function during ``run``, in order."""
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("flce_dist.") and ".kernels." not in name:
            seen[name] = None

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(seen)


def path_of_rank(group: dist.ProcessGroup, schedule: str) -> tuple[list[str], list[str]]:
    """Modules of a second forward, and of its backward."""
    hidden = torch.randn(8, 16, requires_grad=True)
    weight = torch.randn(20, 16, requires_grad=True)
    labels, losses = torch.arange(16), list[torch.Tensor]()
    options: dict[str, Any] = (
        {"filter_eps": 2.0**-12} if schedule == "filtered" else {"schedule": schedule}
    )

    def forward() -> None:
        losses.append(
            linear_cross_entropy(
                hidden, weight, labels, tp_group=group, sequence_parallel=True, impl="eager",
                **options,
            )
        )  # fmt: skip

    forward()
    losses[0].backward()
    return modules_of(forward), modules_of(losses[1].backward)


@pytest.mark.parametrize("schedule", FORWARD)
def test_a_call_passes_few_modules(pools, schedule):
    for forward, backward in pools[2].run(path_of_rank, schedule):
        assert {"flce_dist.api", "flce_dist.parallel.transport"} <= set(forward)
        assert "flce_dist.op.autograd" in backward
        assert len(forward) <= FORWARD[schedule], "\n".join(["forward passes", *forward])
        assert len(backward) <= BACKWARD[schedule], "\n".join(["backward passes", *backward])
