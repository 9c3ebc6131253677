"""``flce_dist.filtered.oracle`` on problems that can be computed by hand."""

from typing import Any

import pytest
import torch

from flce_dist.filtered import filtered_gradients
from flce_dist.filtered.oracle import SAMPLE, TILE_T, TILE_V
from flce_dist.kernels.filtered import tiles as filter_tiles
from flce_dist.testing import relative_rms
from tests.filtered_formula import filtered_gradients as by_name
from tests.filtered_formula import zipf_inputs
from tests.problems import Upstream, run_reference


def test_its_tiles_are_those_of_the_kernels() -> None:
    """It may not import the kernels, so it has the sizes once more."""
    sizes = filter_tiles.TILE_T, filter_tiles.TILE_V, filter_tiles.SAMPLE
    assert sizes == (TILE_T, TILE_V, SAMPLE)


def test_a_tile_that_is_kept_by_nothing_is_mass_times_profile() -> None:
    """256 tokens in two blocks; row 0 keeps tile 0. The sample is one token of each pair."""
    golden = (1 + 5**0.5) / 2
    chosen = [2 * i + int(2 * ((i + 1) * golden % 1)) for i in range(128)]
    hidden = torch.full((256, 1), 3.0, dtype=torch.float64)
    hidden[chosen] = 1.0
    weight = torch.zeros(512, 1, dtype=torch.float64)
    weight[0] = 6.0
    weight[256:] = torch.linspace(-1.0, 0.0, 256)[:, None]
    found = filtered_gradients(
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
    for name, gradient in by_name(inputs, 1e-12, drops=drops, **options).items():
        assert relative_rms(gradient, wanted[name]) < 1e-12, name


def test_a_threshold_at_a_probability_is_refused() -> None:
    operands = torch.zeros(4, 2), torch.zeros(512, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"within 1e-05 of eps = 0\.001953125, relative"):
        filtered_gradients(*operands, eps=1 / 512)
    assert filtered_gradients(*operands, eps=1.001 / 512).rank_one_mass == 0.5
