"""What the tests on a GPU share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy
from flce_dist.arguments.options import ScheduleName
from tests.outcomes import Outcome
from tests.problems import Inputs, Upstream, make_inputs, run_reference

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_cuda = pytest.mark.parametrize("device", [CUDA])
each_device = pytest.mark.parametrize("device", ["cpu", CUDA])

EVERY_SCHEDULE: list[ScheduleName] = ["recompute", "cached", "in_forward", "auto"]
every_schedule = pytest.mark.parametrize("schedule", EVERY_SCHEDULE)

# T, V, H of small problems; V is more than the widest window of columns.
SMALL = {"cpu": (40, 36_000, 16), "cuda": (130, 36_000, 64)}


def our_call(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor]:
    return (linear_cross_entropy(hidden, weight, labels, **options),)


def inputs_on(device: str, T: int, V: int, H: int, dtype: torch.dtype, **kwargs: Any) -> Inputs:
    return make_inputs(T, V, H, dtype, **kwargs).to(torch.device(device))


def options_of(schedule: ScheduleName, inputs: Inputs) -> dict[str, Any]:
    """Keywords of a schedule; of ``auto`` a budget for half of the columns."""
    T, V, itemsize = len(inputs.labels), len(inputs.weight), max(2, inputs.dtype.itemsize)
    if schedule != "auto":
        return {"schedule": schedule}
    return {"schedule": "cached", "max_logits_bytes": T * itemsize * V // 2}


def aim(inputs: Inputs, label_logit: float) -> Inputs:
    """Move each hidden state along its label's row until that logit is about ``label_logit``."""
    hidden, rows = inputs.hidden.float(), inputs.weight[inputs.labels.clamp(min=0)].float()
    step = (label_logit - (hidden * rows).sum(-1)) / rows.square().sum(-1)
    return replace(inputs, hidden=(hidden + step[:, None] * rows).to(inputs.dtype))


def textbook_in_chunks(
    inputs: Inputs, dtype: torch.dtype, *, chunk_elements: int = 1 << 26
) -> Outcome:
    """Return losses [T] and the gradients of their sum, by the reference in ``dtype``.

    It takes a chunk of tokens at a time, so that logits of any number fit; dweight sums chunks in
    fp32, or fp64 for fp64.
    """
    wide = torch.promote_types(dtype, torch.float32)
    dweight = torch.zeros_like(inputs.weight, dtype=wide)
    parts = []
    chunk = max(1, chunk_elements // len(dweight))
    chunks = (x.split(chunk) for x in (inputs.hidden, inputs.labels))
    for hidden, labels in zip(*chunks, strict=True):
        part = replace(inputs, hidden=hidden, labels=labels).to(dtype)
        found = run_reference(part, Upstream(), reduction="none")
        dweight += found["dweight"]
        parts.append((found["loss"], found["dhidden"]))
    loss, dhidden = map(torch.cat, zip(*parts, strict=True))
    return Outcome(loss=loss, dhidden=dhidden, dweight=dweight)


@contextmanager
def host_must_not_wait() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_waiting_host_is_noticed():
    with pytest.raises(RuntimeError, match="synchronizing"), host_must_not_wait():
        torch.ones((), device="cuda").item()
