"""Logits whose count passes 2**31: offsets into what is cached no longer fit into 32 bits.

T = 40,000 tokens by V = 131,072 columns in bf16 are 10.5 GB; H = 256 keeps their products cheap.
An offset that wraps spoils the last tokens and columns only, and may vanish in the error of all:
so these are held against fp64 on their own.
"""

import functools
from dataclasses import replace

import pytest
import torch

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
