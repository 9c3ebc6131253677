"""From which tokens the profiles of filtered gradients are taken.

T tokens, V vocabulary rows, H hidden size.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flce_dist import filtered
from flce_dist.filtered import gradients
from flce_dist.filtered.oracle import sampled_tokens
from flce_dist.kernels.filtered.tiles import SAMPLE
from flce_dist.parallel.token_order import TokenOrder
from flce_dist.testing import relative_rms
from tests.filtered_formula import filtered_gradients, zipf_inputs
from tests.problems import IGNORE, Inputs, Upstream, run_op, run_reference
from tests.test_filtered import EPS

FIRST = torch.arange(512) % 4 == 0  # of each of 128 sequences


def masked(problem: Inputs, way: str) -> tuple[Inputs, Upstream, dict[str, Any]]:
    """The problem without the gradients of ``FIRST``; returns it with its other arguments."""
    if way == "labels":
        return replace(problem, labels=problem.labels.masked_fill(FIRST, IGNORE)), Upstream(), {}
    if way == "token_weight":
        return replace(problem, token_weight=(~FIRST).float()), Upstream(), {}
    return problem, Upstream((~FIRST).float()), {"reduction": "none"}


@pytest.mark.parametrize("way", ["labels", "token_weight", "upstream gradient"])
def test_tokens_without_a_gradient_are_not_sampled(way: str) -> None:
    problem = zipf_inputs(512, 1300, 16, torch.float64, bias=True)
    problem, upstream, options = masked(problem, way)
    actual = run_op(problem, upstream, impl="eager", schedule=filtered.schedule(EPS), **options)
    wanted = filtered_gradients(problem, EPS, upstream, **options)
    for name, gradient in wanted.items():
        assert relative_rms(actual[name], gradient) <= 1e-11, name


@pytest.mark.parametrize("way", ["labels", "token_weight"])
def test_a_mask_costs_no_accuracy(way: str) -> None:
    """A sample of every fourth token is of masked ones alone, and three times as far off."""
    whole = zipf_inputs(512, 3000, 32, ignored=0.0)
    # Rows of a tile differ alike for all tokens.
    whole.weight[:, 0] += torch.randn(3000, generator=torch.Generator().manual_seed(0))

    def error(problem: Inputs, upstream: Upstream, options: dict[str, Any]) -> float:
        actual = run_op(problem, upstream, impl="eager", schedule=filtered.schedule(EPS), **options)
        wanted = run_reference(problem.to(torch.float64), upstream, **options)
        return relative_rms(actual["dhidden"], wanted["dhidden"])

    unmasked = error(whole, Upstream(), {})
    assert error(*masked(whole, way)) <= 1.3 * unmasked


@pytest.mark.parametrize("n", [0, 1, 2, 127, 128, 129, 255, 1000, 8191, 100_003])
def test_each_run_of_counted_tokens_gives_one(n: int) -> None:
    """All tokens while they are few; never one twice."""
    counted = torch.zeros(2 * n + 3, dtype=torch.bool)
    counted[torch.randperm(len(counted), generator=torch.Generator().manual_seed(n))[:n]] = True
    found = gradients.profile_sample(counted, TokenOrder(1, ((0, len(counted)),)))
    used = min(n, SAMPLE)
    assert found[:used].tolist() == sampled_tokens(counted)
    assert counted[found[:used]].all() and (found[used:] == -1).all()
    assert len(found) == SAMPLE and found[:used].unique().numel() == used
    ordinal = (counted.cumsum(0) - 1)[found[:used]]
    assert torch.equal(((ordinal + 1) * used - 1) // max(n, 1), torch.arange(used))


@pytest.mark.parametrize("length", [2, 8, 100, 1024, 4096])
@pytest.mark.parametrize("per_run", [1, 2, 3])
def test_the_sample_has_no_period(length: int, per_run: int) -> None:
    """Of ``per_run`` sequences to a run, it takes tokens from all quarters alike."""
    places = torch.tensor(sampled_tokens(torch.ones(SAMPLE * per_run * length).bool())) % length
    quarters = (places * min(length, 4) // length).bincount(minlength=min(length, 4))
    wanted = SAMPLE / len(quarters)
    assert (quarters >= 0.8 * wanted).all() and (quarters <= 1.2 * wanted).all()
