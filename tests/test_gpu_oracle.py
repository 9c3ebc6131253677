"""What the tests on a GPU share, and the proof that it can be believed.

``textbook_in_chunks`` is the truth at sizes whose logits do not fit: the formula of the gradient
written out, a chunk of tokens at a time, on the device under test. It is held against autograd
through ``flce_dist.reference`` here. T tokens, V vocabulary rows, H hidden size.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy
from flce_dist.op.plan import Plan, plan
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
    """``linear_cross_entropy`` as ``tests.problems.run`` calls it."""
    return (linear_cross_entropy(hidden, weight, labels, **options),)


def inputs_on(device: str, T: int, V: int, H: int, dtype: torch.dtype, **kwargs: Any) -> Inputs:
    return make_inputs(T, V, H, dtype, **kwargs).to(torch.device(device))


def options_of(schedule: Schedule, inputs: Inputs) -> dict[str, Any]:
    """Keywords of a schedule; ``auto`` gets what it is per token: a budget for some columns.

    Where the problem is too small for that, a budget of half of the columns.
    """
    T, V, itemsize = len(inputs.labels), len(inputs.weight), max(2, inputs.dtype.itemsize)
    if schedule != "auto":
        return {"schedule": schedule}
    budgets = [T * itemsize * columns for columns in range(256, V, 256)]
    for budget in budgets:
        if 0 < auto_plan(inputs, budget).cached_v < V:
            return {"schedule": "cached", "max_logits_bytes": budget}
    return {"schedule": "cached", "max_logits_bytes": T * itemsize * V // 2}


def auto_plan(inputs: Inputs, budget: int) -> Plan:
    """What ``auto`` does with ``budget`` bytes, unless it is in_forward."""
    return plan(
        T=len(inputs.labels), V=len(inputs.weight), itemsize=max(2, inputs.dtype.itemsize),
        schedule="auto", max_logits_bytes=budget, converts=inputs.dtype == torch.float16,
    )  # fmt: skip


def aim(inputs: Inputs, label_logit: float) -> Inputs:
    """Move each hidden state along its label's row until that logit is about ``label_logit``."""
    hidden, rows = inputs.hidden.float(), inputs.weight[inputs.labels.clamp(min=0)].float()
    step = (label_logit - (hidden * rows).sum(-1)) / rows.square().sum(-1)
    return replace(inputs, hidden=(hidden + step[:, None] * rows).to(inputs.dtype))


def textbook_in_chunks(
    inputs: Inputs, dtype: torch.dtype, *, g: float = 1.0, chunk_elements: int = _CHUNK_ELEMENTS
) -> Outcome:
    """Return losses [T] and the gradients of ``g`` times their sum, as the textbook has them.

    The operands are taken to ``dtype``. Logits and their gradient are rounded to it, as where 16
    bits of them are kept; the softmax between is fp32, or fp64 for fp64. dweight sums the chunks
    in fp32.
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


def assert_gradients_close(
    actual: Outcome,
    truth: Outcome,
    eager: Outcome,
    dtype: torch.dtype,
    names: tuple[str, ...] = ("dhidden", "dweight"),
) -> None:
    """Raise unless each gradient is finite and within the budget that ``eager`` grants."""
    for name in names:
        budget = error_budget(actual[name], truth[name], eager[name], dtype=dtype)
        assert budget.met, f"{name}: {budget}"


def assert_loss_close(actual: Tensor, truth: Tensor) -> None:
    """fp32, and within 1e-5 of fp64, whatever the operands are."""
    assert actual.dtype == torch.float32
    error = relative_rms(actual, truth)
    assert error <= 1e-5, f"loss: error {error:.3g} of fp64 exceeds 1e-5"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_auto_caches_some_columns_and_recomputes_others(dtype):
    inputs = inputs_on("cpu", 130, 36_000, 16, dtype)
    budget = options_of("auto", inputs)["max_logits_bytes"]
    assert 0 < auto_plan(inputs, budget).cached_v < 36_000


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


def test_aimed_tokens_are_confident():
    inputs = aim(inputs_on("cpu", 37, 70, 16, torch.float32), 15.0)
    counted = inputs.labels != IGNORE
    z = inputs.hidden @ inputs.weight.T
    label_logit = z.gather(1, inputs.labels.clamp(min=0)[:, None])[:, 0]
    torch.testing.assert_close(label_logit[counted], torch.full_like(label_logit[counted], 15.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: {**x, "dhidden": torch.zeros_like(x["dhidden"])},
        lambda x: {**x, "dweight": torch.zeros_like(x["dweight"])},
        lambda x: {**x, "dweight": x["dweight"] * 0.9},
        lambda x: {**x, "dhidden": x["dhidden"].roll(1, 0)},
        lambda x: {**x, "dhidden": x["dhidden"].index_fill(0, torch.tensor([3]), torch.nan)},
    ],
    ids=["zero dhidden", "zero dweight", "a tenth missing", "rows moved", "one row NaN"],
)
def test_wrong_gradients_are_noticed(spoil, dtype):
    inputs = inputs_on("cpu", 37, 70, 16, dtype)
    truth = textbook_in_chunks(inputs, torch.float64)
    eager = textbook_in_chunks(inputs, dtype)
    actual = run(our_call, inputs, Upstream(), reduction="sum")
    assert_gradients_close(actual, truth, eager, dtype)
    with pytest.raises(AssertionError, match="exceeds budget"):
        assert_gradients_close(spoil(actual), truth, eager, dtype)


def test_wrong_losses_are_noticed():
    inputs = inputs_on("cpu", 37, 70, 16, torch.bfloat16)
    truth = textbook_in_chunks(inputs, torch.float64)["loss"]
    loss = run(our_call, inputs, Upstream(1.0), reduction="none")["loss"]
    assert_loss_close(loss, truth)
    for wrong in (loss * (1 + 2e-5), loss.roll(1), torch.zeros_like(loss)):
        with pytest.raises(AssertionError, match="exceeds 1e-5"):
            assert_loss_close(wrong, truth)
