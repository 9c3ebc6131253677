"""Peak memory on a GPU: flat in the vocabulary, and never more than what the plan says.

tests/test_peak_memory.py holds eager to its limits at CPU sizes; the same checks run here at sizes
whose logits would be seen. T tokens, V vocabulary rows, H hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch

from flce_dist import linear_cross_entropy
from flce_dist.memory import peak_memory
from flce_dist.op.plan import Plan, plan
from flce_dist.options import Schedule
from tests.problems import Inputs
from tests.test_gpu_oracle import each_device, inputs_on

MIB = 1 << 20
WORKSPACE = 64 * MIB
ITEMSIZE = 2  # bf16


@dataclass(frozen=True)
class Sizes:
    T: int
    H: int
    narrow: int  # V
    wide: int  # V
    max_logits_bytes: int | None


SIZES = {
    "cpu": Sizes(512, 32, 8192, 32768, 4 * MIB),
    "cuda": Sizes(4096, 1024, 32768, 131072, None),
}


def make(device: str, V: int) -> Inputs:
    sizes = SIZES[device]
    return inputs_on(device, sizes.T, V, sizes.H, torch.bfloat16)


def planned(device: str, V: int, schedule: Schedule) -> Plan:
    sizes = SIZES[device]
    return plan(
        T=sizes.T, V=V, itemsize=ITEMSIZE, schedule=schedule,
        max_logits_bytes=sizes.max_logits_bytes if schedule == "recompute" else None,
    )  # fmt: skip


def step_bytes(inputs: Inputs, **options: Any) -> int:
    """Peak of forward and backward above inputs and gradients, once workspaces exist."""
    hidden, weight = leaves = [x.requires_grad_() for x in (inputs.hidden, inputs.weight)]
    for _ in range(2):
        with peak_memory(inputs.hidden.device) as peak:
            linear_cross_entropy(hidden, weight, inputs.labels, **options).backward()
        for leaf in leaves:
            leaf.grad = None
    return peak.bytes - sum(leaf.nbytes for leaf in leaves)


def recompute_bytes(device: str, V: int) -> int:
    limit = SIZES[device].max_logits_bytes
    return step_bytes(make(device, V), schedule="recompute", max_logits_bytes=limit)


@each_device
def test_recompute_is_flat_in_the_vocabulary(device):
    sizes = SIZES[device]
    narrow, wide = recompute_bytes(device, sizes.narrow), recompute_bytes(device, sizes.wide)
    print(f"recompute beyond inputs and gradients: {narrow / MIB:.1f} MiB at V = {sizes.narrow}, "
          f"{wide / MIB:.1f} MiB at V = {sizes.wide}")  # fmt: skip
    assert abs(wide - narrow) <= 8 * MIB
    window = planned(device, sizes.wide, "recompute").logits_bytes
    dhidden_accumulator = 4 * sizes.T * sizes.H
    assert max(narrow, wide) <= dhidden_accumulator + window + WORKSPACE


@each_device
def test_cached_takes_its_exponentials_and_little_more(device):
    sizes = SIZES[device]
    inputs = make(device, sizes.narrow)
    peak = step_bytes(inputs, schedule="cached")
    exponentials = sizes.T * sizes.narrow * ITEMSIZE
    assert planned(device, sizes.narrow, "cached").logits_bytes == exponentials
    assert exponentials <= peak  # else the meter does not see them
    assert peak <= exponentials + 4 * sizes.T * sizes.H + WORKSPACE


@each_device
def test_a_forward_without_gradients_needs_next_to_nothing(device):
    T, V, H = (512, 16384, 32) if device == "cpu" else (32768, 131072, 512)
    limit = 52 * MIB if device == "cpu" else 44 * MIB  # eager works on windows of 16 MiB
    inputs = inputs_on(device, T, V, H, torch.bfloat16)
    with torch.no_grad():
        for _ in range(2):
            with peak_memory(device) as peak:
                linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels)
    print(f"forward without gradients: {peak.bytes / MIB:.1f} MiB at T = {T}, V = {V}")
    assert peak.bytes <= limit
