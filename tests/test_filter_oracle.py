"""The definition of filtered gradients by hand, and from which tokens their profiles are taken.

T tokens, V vocabulary rows, H hidden size.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flce_dist import filtered
from flce_dist.filtered.oracle import SAMPLE, sampled_tokens
from flce_dist.kernels.filtered.interface import filter_kernels_of
from flce_dist.testing import relative_rms
from tests.filtered_formula import filtered_gradients, zipf_inputs
from tests.problems import IGNORE, Upstream, both, run_op, run_reference
from tests.test_filtered import EPS


def test_a_tile_that_is_kept_by_nothing_is_mass_times_profile() -> None:
    """256 tokens in two blocks; row 0 keeps tile 0. The sample is one token of each pair."""
    golden = (1 + 5**0.5) / 2
    chosen = [2 * i + int(2 * ((i + 1) * golden % 1)) for i in range(128)]
    hidden = torch.full((256, 1), 3.0, dtype=torch.float64)
    hidden[chosen] = 1.0
    weight = torch.zeros(512, 1, dtype=torch.float64)
    weight[0] = 6.0
    weight[256:] = torch.linspace(-1.0, 0.0, 256)[:, None]
    found = filtered.filtered_gradients(
        hidden, weight, torch.zeros(256, dtype=torch.int64), eps=0.1, reduction="sum"
    )
    assert found.kept.tolist() == [[True, False], [True, False]]
    p = (hidden @ weight.T).softmax(1)
    mass = p[:, 256:].sum(1, keepdim=True)
    profile = p[chosen[0], 256:] / mass[chosen[0]]
    p[:, 256:] = mass * profile
    p[:, 0] -= 1
    assert relative_rms(found.dweight, p.T @ hidden) < 1e-14
    assert relative_rms(found.dhidden, p @ weight) < 1e-14
    assert found.rank_one_mass.item() == pytest.approx(mass.mean().item())
    assert found.dbias is None


@pytest.mark.parametrize("drops", [False, True])
def test_where_all_tiles_are_kept_it_is_the_gradient_of_the_loss(drops: bool) -> None:
    inputs = zipf_inputs(200, 700, 8, torch.float64, bias=True, token_weight=True)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss_weight": 0.01, "logit_scale": 0.7}
    wanted = run_reference(inputs, Upstream(), **options)
    for name, gradient in filtered_gradients(inputs, 1e-12, drops=drops, **options).items():
        assert relative_rms(gradient, wanted[name]) < 1e-12, name


def test_a_threshold_at_a_probability_is_refused() -> None:
    operands = torch.zeros(4, 2), torch.zeros(512, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"within 1e-05 of eps = 0\.001953125, relative"):
        filtered.filtered_gradients(*operands, eps=1 / 512)
    assert filtered.filtered_gradients(*operands, eps=1.001 / 512).rank_one_mass == 0.5


# --- the sample


@pytest.mark.parametrize("way", ["labels", "token_weight", "upstream gradient"])
def test_tokens_without_a_gradient_are_not_sampled(way: str) -> None:
    """They are the first of each of 128 sequences."""
    problem = zipf_inputs(512, 1300, 16, torch.float64, bias=True)
    upstream, first, options = Upstream(), torch.arange(512) % 4 == 0, {}
    if way == "labels":
        problem.labels[first] = IGNORE
    elif way == "token_weight":
        problem = replace(problem, token_weight=(~first).float())
    else:
        upstream, options = Upstream((~first).float()), {"reduction": "none"}
    schedule: Any = filtered.schedule(EPS)
    actual = run_op(problem, upstream, impl="eager", schedule=schedule, **options)
    for name, gradient in filtered_gradients(problem, EPS, upstream, **options).items():
        assert relative_rms(actual[name], gradient) <= 1e-11, name


@pytest.mark.parametrize("n", [0, 1, 2, 127, 128, 129, 255, 1000, 8191, 30_011])
@both
def test_each_run_of_counted_tokens_gives_one(impl: str, n: int) -> None:
    """All tokens while they are few; never one twice."""
    counted = torch.zeros(2 * n + 3, dtype=torch.bool)
    counted[torch.randperm(len(counted), generator=torch.Generator().manual_seed(n))[:n]] = True
    labels, scale = torch.zeros_like(counted).long(), torch.ones(len(counted))
    others = (~counted).nonzero().squeeze(1)
    labels[others[::2]], scale[others[1::2]] = -100, 0.0
    found = filter_kernels_of(impl).profile_sample(labels, scale, None, ignore_index=-100)
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
