"""What the tests on a GPU share, and the proof that it can be believed.

``textbook_in_chunks`` is the truth at sizes whose logits do not fit: the formula of the gradient
written out, a chunk of tokens at a time, on the device under test.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy
from flce_dist.options import Schedule
from flce_dist.testing import error_budget, relative_rms
from tests.problems import IGNORE, Inputs, Outcome, Upstream, make_inputs, run, run_reference

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_cuda = pytest.mark.parametrize("device", [CUDA])
each_device = pytest.mark.parametrize("device", ["cpu", CUDA])

EVERY_SCHEDULE: list[Schedule] = ["recompute", "cached", "in_forward", "auto"]
every_schedule = pytest.mark.parametrize("schedule", EVERY_SCHEDULE)

# T, V, H of small problems; V is more than the widest window of columns.
SMALL = {"cpu": (40, 36_000, 16), "cuda": (130, 36_000, 64)}

_CHUNK_ELEMENTS = 1 << 27  # of logits: 1 GiB in fp64


def our_call(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor]:
    return (linear_cross_entropy(hidden, weight, labels, **options),)


def inputs_on(device: str, T: int, V: int, H: int, dtype: torch.dtype, **kwargs: Any) -> Inputs:
    return make_inputs(T, V, H, dtype, **kwargs).to(torch.device(device))


def options_of(schedule: Schedule, inputs: Inputs) -> dict[str, Any]:
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
    inputs: Inputs, dtype: torch.dtype, *, g: float = 1.0, chunk_elements: int = _CHUNK_ELEMENTS
) -> Outcome:
    """Return losses [T] and the gradients of ``g`` times their sum, as the textbook has them.

    Operands, logits and their gradient are rounded to ``dtype``; the softmax between and the sum of
    chunks in dweight are fp32, or fp64 for fp64.
    """
    wide = torch.promote_types(dtype, torch.float32)
    hidden, weight = inputs.hidden.to(dtype), inputs.weight.to(dtype)
    (T, H), V = hidden.shape, len(weight)
    loss = hidden.new_zeros(T, dtype=wide)
    dhidden = torch.empty_like(hidden)
    dweight = weight.new_zeros(V, H, dtype=wide)
    step = max(1, chunk_elements // V)
    for start in range(0, T, step):
        chunk = slice(start, start + step)
        labels = inputs.labels[chunk, None]
        counted = labels != IGNORE
        labels = labels.where(counted, 0)
        z = (hidden[chunk] @ weight.T).to(wide)
        lse = z.logsumexp(-1, keepdim=True)
        loss[chunk] = ((lse - z.gather(-1, labels)) * counted).squeeze(-1)
        dz = z.sub_(lse).exp_()
        dz.scatter_add_(-1, labels, torch.full_like(lse, -1.0))
        dz = dz.mul_(g * counted.to(wide)).to(dtype)
        dhidden[chunk] = dz @ weight
        dweight += dz.T @ hidden[chunk]
    return {"loss": loss, "dhidden": dhidden, "dweight": dweight}


def assert_close(
    actual: Outcome,
    truth: Outcome,
    eager: Outcome,
    dtype: torch.dtype,
    names: Iterable[str] = ("loss", "dhidden", "dweight"),
    rows: Any = slice(None),
) -> None:
    """Compare ``rows`` of these results with fp64; a total loss with the sum of all.

    The loss may be off by 1e-5 whatever the operands are, a gradient by what ``eager`` grants.
    """
    for name in names:
        if name != "loss":
            budget = error_budget(*(x[name][rows] for x in (actual, truth, eager)), dtype=dtype)
            assert budget.met, f"{name}: {budget}"
            continue
        loss, expected = actual["loss"], truth["loss"]
        assert loss.dtype == torch.float32
        one_each = loss.dim() > 0
        error = relative_rms(
            *((loss[rows], expected[rows]) if one_each else (loss, expected.sum()))
        )
        assert error <= 1e-5, f"loss: error {error:.3g} exceeds budget 1e-5"


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


@each_device
@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize("chunk_elements", [1, 70 * 8, 1 << 20])
def test_the_truth_is_that_of_autograd(device, confident, chunk_elements):
    inputs = inputs_on(device, 37, 70, 16, torch.float32)
    inputs = aim(inputs, 12.0) if confident else inputs
    ours = textbook_in_chunks(inputs, torch.float64, g=0.7, chunk_elements=chunk_elements)
    truth = run_reference(inputs.to(torch.float64), Upstream(0.7), reduction="none")
    assert (ours["loss"][inputs.labels == IGNORE] == 0).all()
    for name, result in ours.items():
        assert relative_rms(result, truth[name]) <= 1e-11, name


@pytest.mark.parametrize(
    ("name", "factor"), [("dweight", 0.9), ("dhidden", torch.nan), ("loss", 1 + 2e-5)]
)
def test_a_wrong_result_is_noticed(name, factor):
    inputs = inputs_on("cpu", 37, 70, 16, torch.bfloat16)
    others = textbook_in_chunks(inputs, torch.float64), textbook_in_chunks(inputs, torch.bfloat16)
    actual = run(our_call, inputs, Upstream(), reduction="none")
    assert_close(actual, *others, torch.bfloat16)
    with pytest.raises(AssertionError, match=f"^{name}: .* exceeds budget"):
        assert_close({**actual, name: factor * actual[name]}, *others, torch.bfloat16)
