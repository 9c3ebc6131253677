"""Logits whose count passes 2**31: offsets into what is cached no longer fit into 32 bits.

T = 40,000 tokens by V = 131,072 columns in bf16 are 10.5 GB; H = 256 keeps their products cheap.
An offset that wraps spoils the last tokens and columns only, and may vanish in the error of all:
so these are held against fp64 on their own.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy
from flce_dist.options import Schedule
from flce_dist.testing import relative_rms
from tests.problems import SCHEDULES, Inputs, Outcome, Upstream, run
from tests.test_gpu_oracle import (
    assert_gradients_close,
    assert_loss_close,
    each_device,
    inputs_on,
    our_call,
    textbook_in_chunks,
)

SIZES = {"cpu": (400, 512, 16), "cuda": (40_000, 131_072, 256)}  # T, V, H
LAST = {"cpu": 64, "cuda": 512}  # the last tokens have the last columns as labels, one each
NEEDED_BYTES = 20 << 30


@functools.lru_cache(maxsize=1)
def problem(device: str) -> tuple[Inputs, Outcome, Outcome]:
    """Inputs, truth in fp64 and eager PyTorch, for the sum of losses."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < NEEDED_BYTES:
        pytest.skip("needs 20 GiB of free GPU memory for 5.2e9 logits in bf16 and their fp64 truth")
    (T, V, H), last = SIZES[device], LAST[device]
    inputs = inputs_on(device, T, V, H, torch.bfloat16, spread=3.0)
    labels = inputs.labels.where(inputs.labels < V - last, 0)
    labels[-last:] = torch.arange(V - last, V, device=labels.device)
    inputs = replace(inputs, labels=labels)
    chunk = {} if device == "cuda" else {"chunk_elements": 16 * V}
    truth = textbook_in_chunks(inputs, torch.float64, **chunk)
    return inputs, truth, textbook_in_chunks(inputs, torch.bfloat16, **chunk)


def first_beyond(device: str) -> int:
    """The first token whose logits all lie beyond 2**31 elements (a third of all on a CPU)."""
    T, V, _ = SIZES[device]
    return (1 << 31) // V + 1 if device == "cuda" else T // 3


def check(device: str, actual: Outcome, truth: Outcome, eager: Outcome) -> None:
    """Everything, then the tokens beyond 2**31, then the last tokens and columns."""
    beyond, last = first_beyond(device), LAST[device]
    parts: list[tuple[slice, tuple[str, ...]]] = [
        (slice(None), ("dhidden", "dweight")),
        (slice(beyond, None), ("dhidden",)),
        (slice(-last, None), ("dhidden", "dweight")),
    ]
    for part, names in parts:
        ours, fp64, bf16 = ({n: x[n][part] for n in names} for x in (actual, truth, eager))
        assert_gradients_close(ours, fp64, bf16, torch.bfloat16, names)
    if actual["loss"].dim() == 0:
        assert_loss_close(actual["loss"], truth["loss"].sum())
        return
    for part in (slice(None), slice(beyond, None), slice(-last, None)):
        assert_loss_close(actual["loss"][part], truth["loss"][part])


def results(device: str, schedule: Schedule) -> Outcome:
    """A loss for each token, where the schedule allows it."""
    options: dict[str, Any] = {"schedule": schedule}
    options["reduction"] = "sum" if schedule == "in_forward" else "none"
    return run(our_call, problem(device)[0], Upstream(), **options)


@each_device
@pytest.mark.parametrize("schedule", [*SCHEDULES, "auto"])
def test_more_than_two_to_the_31_logits(schedule, device):
    _, truth, eager = problem(device)
    check(device, results(device, schedule), truth, eager)


@each_device
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_column_major_weight_of_more_than_two_to_the_31_elements(schedule, device):
    """Offsets along H wrap from H = 7953 on; against the same weight row-major."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < NEEDED_BYTES:
        pytest.skip("needs 20 GiB of free GPU memory for two weights and their gradients")
    T, V, H = {"cpu": (8, 300, 64), "cuda": (64, 270_000, 8192)}[device]
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    torch.manual_seed(0)
    hidden = torch.randn(T, H, **options)
    column_major = torch.randn(H, V, **options).mul_(H**-0.5).t()
    labels = torch.arange(V - T, V, device=device)

    results = []
    for weight in (column_major, column_major.contiguous()):
        leaves = hidden.clone().requires_grad_(), weight.requires_grad_()
        loss = linear_cross_entropy(*leaves, labels, schedule=schedule)
        dhidden, dweight = torch.autograd.grad(loss, leaves)
        # Last rows and columns: fp64 copies of all would be 18 GB each.
        results.append((loss.detach(), dhidden, dweight[-2 * T :].clone(), dweight[:, -T:].clone()))
        del leaves, dweight
    for ours, expected in zip(*results, strict=True):
        assert relative_rms(ours, expected) <= (1e-6 if ours.dim() == 0 else 5e-3)


def at(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Outcome], Outcome]:
    """Change the last four tokens or columns alone."""
    return lambda x: {**x, name: torch.cat([x[name][:-4], change(x[name][-4:])])}


@pytest.mark.parametrize(
    "spoil",
    [
        at("dhidden", torch.zeros_like),
        at("dweight", torch.zeros_like),
        at("dweight", lambda x: x.roll(1, 0)),
        at("loss", torch.zeros_like),
    ],
    ids=["dhidden", "dweight", "label columns", "loss"],
)
def test_a_few_wrong_rows_at_the_end_are_noticed(spoil):
    _, truth, eager = problem("cpu")
    actual = results("cpu", "cached")
    check("cpu", actual, truth, eager)
    with pytest.raises(AssertionError, match="exceeds"):
        check("cpu", spoil(actual), truth, eager)
