"""Peak memory on a GPU: flat in the vocabulary, and never more than what the plan says.

tests/test_peak_memory.py holds eager to its limits at CPU sizes.
"""

from typing import Any

import torch

from flce_dist import linear_cross_entropy
from flce_dist.memory import peak_memory
from flce_dist.op.plan import plan
from tests.test_gpu_oracle import each_device, inputs_on

MIB = 1 << 20
WORKSPACE = 64 * MIB
SIZES = {"cpu": (512, 32, 8192, 32768), "cuda": (4096, 1024, 32768, 131072)}  # T, H, two V
BUDGETS = {"cpu": 4 * MIB, "cuda": None}  # of recompute


def measured(device: str, V: int, options: Any) -> tuple[int, int]:
    """Peak of a second step beyond inputs and gradients, and the logits that the plan keeps."""
    T, H, *_ = SIZES[device]
    inputs = inputs_on(device, T, V, H, torch.bfloat16)
    hidden, weight = leaves = [x.requires_grad_() for x in (inputs.hidden, inputs.weight)]
    for _ in range(2):
        with peak_memory(inputs.hidden.device) as peak:
            linear_cross_entropy(hidden, weight, inputs.labels, **options).backward()
        for leaf in leaves:
            leaf.grad = None
    planned = plan(T=T, V=V, itemsize=2, **{"max_logits_bytes": None, **options})
    return peak.bytes - sum(leaf.nbytes for leaf in leaves), planned.logits_bytes


@each_device
def test_recompute_is_flat_in_the_vocabulary(device):
    T, H, *both = SIZES[device]
    options = {"schedule": "recompute", "max_logits_bytes": BUDGETS[device]}
    (narrow, _), (wide, window) = (measured(device, V, options) for V in both)
    print(f"recompute beyond inputs and gradients: {narrow / MIB:.1f} MiB at V = {both[0]}, "
          f"{wide / MIB:.1f} MiB at V = {both[1]}")  # fmt: skip
    assert abs(wide - narrow) <= 8 * MIB
    dhidden_accumulator = 4 * T * H
    assert max(narrow, wide) <= dhidden_accumulator + window + WORKSPACE


@each_device
def test_cached_takes_its_exponentials_and_little_more(device):
    T, H, V, _ = SIZES[device]
    peak, exponentials = measured(device, V, {"schedule": "cached"})
    assert exponentials == 2 * T * V
    assert exponentials <= peak  # else the meter does not see them
    assert peak <= exponentials + 4 * T * H + WORKSPACE


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
