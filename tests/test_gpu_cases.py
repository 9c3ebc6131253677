"""Calls that are rare and must be right on a GPU: hopeless labels, a group of one, odd tensors.

T tokens, V vocabulary rows, H hidden size.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import filtered, linear_cross_entropy
from flce_dist.kernels.token_loss_formulas import RESCUE_ABOVE
from flce_dist.memory import peak_memory
from tests.problems import Inputs, Outcome, Upstream, assert_same, each_dtype, each_schedule, run
from tests.test_gpu_oracle import (
    EVERY_SCHEDULE,
    aim,
    assert_close,
    each_device,
    group_of_one,
    inputs_on,
    on_cuda,
    options_of,
    our_call,
    textbook_in_chunks,
)

FILTERED = {"schedule": filtered.schedule(2.0**-9)}
# Of calls whose results are compared among themselves.
WAYS: dict[str, dict[str, Any]] = {
    **{name: {"schedule": name} for name in EVERY_SCHEDULE},
    "filtered": FILTERED,
}
each_way = pytest.mark.parametrize("way", WAYS)


# --- labels far below the largest logit

HOPELESS = {"one": slice(300, 301), "one of each block": slice(5, None, 128), "all": slice(None)}


def hopeless_inputs(device: str, dtype: torch.dtype, where: slice) -> Inputs:
    """Inputs of which some have a label more than ``RESCUE_ABOVE`` below the largest logit."""
    T, V = (1000, 3000) if device == "cuda" else (400, 300)
    inputs = inputs_on(device, T, V, 64, dtype, ignored=0.0)
    far = aim(inputs, -1.5 * RESCUE_ABOVE)
    hidden = inputs.hidden.clone()
    hidden[where] = far.hidden[where]
    inputs = replace(inputs, hidden=hidden)
    z = hidden.double() @ inputs.weight.double().T
    below = z.amax(1) - z.gather(1, inputs.labels[:, None])[:, 0]
    flagged = below > RESCUE_ABOVE
    assert flagged[where].all() and flagged.sum() == len(hidden[where])
    return inputs


@each_device
@each_dtype
@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
@pytest.mark.parametrize("name", HOPELESS)
def test_labels_far_below_the_largest_logit(name, schedule, dtype, device):
    """Everything, then the hopeless tokens and the others on their own; in_forward as a mean."""
    hopeless, total = HOPELESS[name], schedule == "in_forward"
    inputs = hopeless_inputs(device, dtype, hopeless)
    T = len(inputs.labels)
    truth, eager = (textbook_in_chunks(inputs, kind) for kind in (torch.float64, dtype))
    if total:
        truth["loss"] /= T
    actual = run(
        our_call, inputs, Upstream(float(T) if total else 1.0),
        reduction="mean" if total else "none", **options_of(schedule, inputs),
    )  # fmt: skip
    assert_close(actual, truth, eager, dtype)
    others = torch.ones(T, dtype=torch.bool, device=device)
    others[hopeless] = False
    for tokens in (hopeless, others) if name != "all" else ():
        names = ("dhidden",) if total else ("dhidden", "loss")
        assert_close(actual, truth, eager, dtype, names, tokens)


# --- a group of one rank


def what_runs(inputs: Inputs, **options: Any) -> tuple[Outcome, Counter[str], int]:
    """Results, kernels and copies by name, and peak memory; the second time, all being there."""
    for _ in range(2):
        with peak_memory(inputs.hidden.device) as peak:
            results = run(our_call, inputs, Upstream(), **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run(our_call, inputs, Upstream(), **options)
        torch.cuda.synchronize()
    events = profiler.events() or ()
    on_gpu = (x for x in events if x.device_type == torch.autograd.DeviceType.CUDA)
    return results, Counter(x.name for x in on_gpu), peak.bytes


@on_cuda
@each_way
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_group_of_one_rank_is_no_group(sequence_parallel, way, device):
    inputs = inputs_on(device, 4096, 5000, 1024, torch.bfloat16, bias=True)
    alone = what_runs(inputs, **WAYS[way])
    with group_of_one(device) as group:
        options = {"tp_group": group, "sequence_parallel": sequence_parallel, **WAYS[way]}
        grouped = what_runs(inputs, **options)
    assert_same(grouped[0], alone[0])
    assert grouped[1] == alone[1] and sum(alone[1].values()) > 3
    assert 0 < grouped[2] <= alone[2] + (1 << 20)  # hidden has 8 MiB


# --- the negative bit


def negative(x: Tensor) -> Tensor:
    """The numbers of ``x``, stored with the other sign behind PyTorch's negative bit."""
    lazy = torch._neg_view(-x)
    assert lazy.is_neg() and torch.equal(lazy.resolve_neg(), x)
    return lazy


@each_device
@each_dtype
@each_schedule
@pytest.mark.parametrize("which", ["hidden", "weight", "bias", "token_weight", "upstream"])
def test_the_negative_bit_is_read(which, schedule, dtype, device):
    inputs = inputs_on(device, 130, 700, 64, dtype, bias=True, token_weight=True)
    upstream = torch.tensor(0.7, device=device)

    def results(lazy: bool) -> list[Tensor]:
        given = {name: x.clone() for name, x in vars(inputs).items()} | {"upstream": upstream}
        if lazy:
            given[which] = negative(given[which])
        g, labels = given.pop("upstream"), given.pop("labels")
        leaves = [given[name].requires_grad_() for name in ("hidden", "weight", "bias")]
        loss = linear_cross_entropy(labels=labels, schedule=schedule, **given)
        return [loss.detach(), *torch.autograd.grad(loss, leaves, g)]

    for one, other in zip(results(True), results(False), strict=True):
        assert torch.equal(one, other)
