"""How far results are from fp64: at a realistic shape, beside 16-bit logits, of 2**31 and more.

Each check has a small CPU form, which proves the check; the sizes that matter need a GPU.
"""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flce_dist.testing import relative_rms
from tests.devices import (
    CUDA,
    each_device,
    every_schedule,
    inputs_on,
    options_of,
    our_call,
)
from tests.outcomes import Outcome, misses
from tests.problems import SCHEDULES, Inputs, Upstream, each_dtype, run, run_reference


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


SIZES = {"cpu": (40, 36_000, 32), "cuda": (1024, 40_000, 1024)}  # T, V, H


@functools.lru_cache(maxsize=1)
def ordinary(device: str, dtype: torch.dtype) -> tuple[Inputs, Outcome, Outcome]:
    inputs = inputs_on(device, *SIZES[device], dtype)
    return inputs, textbook_in_chunks(inputs, torch.float64), textbook_in_chunks(inputs, dtype)


@each_device
@each_dtype
@every_schedule
def test_every_schedule_at_a_realistic_shape(schedule, dtype, device):
    inputs, truth, eager = ordinary(device, dtype)
    # Upstream of a mean as large as a loss scale makes it: of order 1 for each token.
    counted = (inputs.labels >= 0).sum()
    actual = run(our_call, inputs, Upstream(counted), **options_of(schedule, inputs))
    assert misses(actual, truth | {"loss": truth["loss"].sum() / counted}, eager, dtype) == []


def eager_call(hidden: Tensor, weight: Tensor, labels: Tensor, **_: Any) -> tuple[Tensor]:
    return (F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum"),)


def predictions(kind: str, device: str, V: int, H: int) -> Inputs:
    """512 tokens in bf16, 128 on a CPU, by how their labels are predicted.

    "drawn": from peaked predictions, as of a trained model (a loss of 2 to 4). "confident": a loss
    of 1e-2 or less. "uninformed": nearly uniform predictions, as at the first step of a training.
    """
    spread = {"drawn": 4.0, "confident": 2.0, "uninformed": 1.0}[kind]
    T = 512 if device == "cuda" else 128
    inputs = inputs_on(device, T, V, H, torch.bfloat16, ignored=0.0, spread=spread)
    if kind == "confident":
        return aim(inputs, math.log(V) + 9.0)
    if kind == "drawn":
        g = torch.Generator(device).manual_seed(0)
        p = (inputs.hidden.float() @ inputs.weight.float().T).softmax(-1)
        return replace(inputs, labels=torch.multinomial(p, 1, generator=g).squeeze(-1))
    return inputs


@pytest.mark.parametrize(
    ("device", "V", "H"), [("cpu", 700, 48), pytest.param("cuda", 128256, 1024, marks=CUDA.marks)]
)
@pytest.mark.parametrize("kind", ["drawn", "confident", "uninformed"])
def test_error_beside_that_of_logits_in_bf16(kind, device, V, H):
    """Exponentials kept in bf16 against logits kept in bf16, and against eager PyTorch.

    Exponentials cost three roundings of a relative eps, logits more wherever predictions are
    informed. Where every probability is near 0 the gradient is minus one hidden state or row.
    """
    inputs = predictions(kind, device, V, H)
    truth = textbook_in_chunks(inputs, torch.float64)
    results = {
        "ours, cached": run(our_call, inputs, Upstream(), schedule="cached", reduction="sum"),
        "bf16 logits": textbook_in_chunks(inputs, torch.bfloat16),
        "torch eager": run(eager_call, inputs, Upstream()),
    }
    loss = truth["loss"].sum()
    print(f"{kind} labels, V = {V}: mean loss {loss.item() / len(inputs.labels):.3g}")
    errors = {(who, "loss"): relative_rms(r["loss"].sum(), loss) for who, r in results.items()}
    for name in ("dhidden", "dweight"):
        for who, result in results.items():
            errors[who, name] = relative_rms(result[name], truth[name])
    for (who, name), error in errors.items():
        print(f"{kind} labels, {name}: {who} is {error:.2g} from fp64 (relative RMS)")

    names = ("loss", "dhidden", "dweight") if kind != "uninformed" else ("loss",)
    for name in names:
        for other in ("bf16 logits", "torch eager"):
            assert errors["ours, cached", name] < errors[other, name], (name, other)
    for name in ("dhidden", "dweight"):
        assert errors["ours, cached", name] <= torch.finfo(torch.bfloat16).eps / 2
        if kind == "confident":  # logits in bf16 must not pass for ours
            assert errors["bf16 logits", name] > 3 * errors["ours, cached", name]


@each_device
@pytest.mark.parametrize("impl", [None, "triton"])
@every_schedule
def test_of_eight_tokens_ours_rounds_no_more_than_eager(schedule, impl, device):
    """A dlogit near -1 at the label is most of the gradient, and all but exact in bf16."""
    inputs = inputs_on(device, 8, 1500, 64, torch.bfloat16, ignored=0.0, spread=1.0)
    truth = textbook_in_chunks(inputs, torch.float64)
    eager = run(eager_call, inputs, Upstream())
    options = {**options_of(schedule, inputs), "impl": impl}
    actual = run(our_call, inputs, Upstream(8.0), **options)
    for name in ("dhidden", "dweight"):
        ours, expected = (relative_rms(x[name], truth[name]) for x in (actual, eager))
        assert ours <= 1.25 * expected, f"{name}: {ours:.3g}, eager {expected:.3g}"


# More than 2**31 logits: offsets into what is cached no longer fit into 32 bits.
# T = 40,000 tokens by V = 131,072 columns in bf16 are 10.5 GB; H = 256 keeps their products cheap.
# An offset that wraps spoils the last tokens and columns only, and may vanish in the error of all:
# so these are held against fp64 on their own.
LARGE = {"cpu": (400, 512, 16), "cuda": (40_000, 131_072, 256)}  # T, V, H
LAST = {"cpu": 64, "cuda": 512}  # the last tokens have the last columns as labels, one each
NEEDED_BYTES = 20 << 30


@functools.lru_cache(maxsize=1)
def large(device: str) -> tuple[Inputs, Outcome, Outcome]:
    if device == "cuda" and torch.cuda.mem_get_info()[0] < NEEDED_BYTES:
        pytest.skip("needs 20 GiB of free GPU memory for 5.2e9 logits in bf16 and their fp64 truth")
    (T, V, H), last = LARGE[device], LAST[device]
    inputs = inputs_on(device, T, V, H, torch.bfloat16, spread=3.0)
    labels = inputs.labels.where(inputs.labels < V - last, 0)
    labels[-last:] = torch.arange(V - last, V, device=labels.device)
    inputs = replace(inputs, labels=labels)
    chunk = {} if device == "cuda" else {"chunk_elements": 16 * V}
    truth = textbook_in_chunks(inputs, torch.float64, **chunk)
    return inputs, truth, textbook_in_chunks(inputs, torch.bfloat16, **chunk)


def first_beyond(device: str) -> int:
    """The first token whose logits all lie beyond 2**31 elements (a third of all on a CPU)."""
    T, V, _ = LARGE[device]
    return (1 << 31) // V + 1 if device == "cuda" else T // 3


@each_device
@pytest.mark.parametrize("schedule", [*SCHEDULES, "auto"])
def test_more_than_two_to_the_31_logits(schedule, device):
    inputs, truth, eager = large(device)
    of_tokens = {"dhidden": slice(first_beyond(device), None)}
    if schedule == "in_forward":
        truth = truth.changed(loss=truth["loss"].sum())
    else:
        of_tokens["loss"] = of_tokens["dhidden"]
    how = {"schedule": schedule, "reduction": "sum" if schedule == "in_forward" else "none"}
    actual = run(our_call, inputs, Upstream(), **how)
    last = dict.fromkeys((*of_tokens, "dweight"), slice(-LAST[device], None))
    for rows in (dict.fromkeys(truth, ...), of_tokens, last):
        found, expected, rounded = (
            {name: x[name][at] for name, at in rows.items()} for x in (actual, truth, eager)
        )
        assert misses(found, expected, rounded, torch.bfloat16) == []
