"""Logits whose count passes 2**31: offsets into what is cached no longer fit into 32 bits.

T = 40,000 tokens by V = 131,072 columns in bf16 are 10.5 GB; H = 256 keeps their products cheap.
An offset that wraps spoils the last tokens and columns only, and may vanish in the error of all:
so these are held against fp64 on their own.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy
from flce_dist.testing import relative_rms
from tests.problems import SCHEDULES, Inputs, Outcome, Upstream, run
from tests.test_gpu_oracle import (
    assert_close,
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


@each_device
@pytest.mark.parametrize("schedule", [*SCHEDULES, "auto"])
def test_more_than_two_to_the_31_logits(schedule, device):
    """Everything, then the tokens beyond 2**31, then the last tokens and columns."""
    inputs, truth, eager = problem(device)
    total = schedule == "in_forward"
    how = {"schedule": schedule, "reduction": "sum" if total else "none"}
    actual = run(our_call, inputs, Upstream(), **how)
    of_tokens = ("dhidden",) if total else ("dhidden", "loss")
    beyond, last = slice(first_beyond(device), None), slice(-LAST[device], None)
    assert_close(actual, truth, eager, torch.bfloat16)
    assert_close(actual, truth, eager, torch.bfloat16, of_tokens, beyond)
    assert_close(actual, truth, eager, torch.bfloat16, (*of_tokens, "dweight"), last)


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
