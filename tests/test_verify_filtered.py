"""The cases of ``launch.verify`` with filter_eps: their data, and the mistakes that they find."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import filtered, linear_cross_entropy, vocab_range
from flce_dist.kernels.filtered import eager as eager_filter
from flce_dist.launch.verify import __main__ as verify
from flce_dist.launch.verify import results as verify_results
from flce_dist.launch.verify.cases import FILTER_EPS, Case, cases, filtered_shape, filtered_variants
from flce_dist.launch.verify.checks import Truth, make_truth, run_case
from flce_dist.launch.verify.data import Data, make_data

TILE_T, TILE_V = 128, 256
CASES = [
    case for variant in filtered_variants() for case in cases(variant, ("recompute",), 1, None)
]
DTYPES = list(verify.DTYPES.values())


@functools.cache
def data_of(case: Case, dtype: torch.dtype, P: int = 1, seed: int = 0) -> Data:
    return make_data(case.variant, filtered_shape(P), P, dtype, torch.device("cpu"), seed)


@functools.cache
def truth_of(case: Case, dtype: torch.dtype) -> Truth:
    return make_truth(data_of(case, dtype), case.variant, False, case.filter_eps, P=1)


def missed(case: Case, dtype: torch.dtype) -> set[str]:
    """Names of the checks that ``case`` does not pass."""
    checks = run_case(case, data_of(case, dtype), truth_of(case, dtype), None, "eager")
    return {name for name, check in checks.items() if not check.met}


def probabilities(case: Case, data: Data) -> Tensor:
    """[T, vocab_size], 0 for ignored tokens."""
    counted = (data.labels >= 0)[:, None]
    weight = data.weight[: data.vocab_size].double()
    z = data.hidden.double().where(counted, 0.0) @ weight.T
    z = z * dict(case.variant.options).get("logit_scale", 1.0)
    if data.bias is not None:
        z = z + data.bias[: data.vocab_size].double()
    if data.temperature is not None:
        z = z / data.temperature[:, None]
    return z.softmax(1).where(counted, 0.0)


@pytest.mark.parametrize("P", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("variant", range(len(filtered_variants())))
def test_no_probability_is_near_the_threshold(P, seed, variant):
    case = Case(filtered_variants()[variant], "recompute", False)
    data = data_of(case, torch.float32, P, seed)
    p = probabilities(case, data)
    for rank in range(P):
        start, end = vocab_range(len(data.weight), rank, P)
        for first in range(start, min(end, data.vocab_size), TILE_V):
            tile = p[:, first : min(first + TILE_V, end)]
            for block in tile.split(TILE_T):
                assert not FILTER_EPS / 2 < block.max() < 2 * FILTER_EPS


def test_tiles_and_labels_are_of_all_kinds():
    data = data_of(CASES[0], torch.float32)
    p, counted = probabilities(CASES[0], data), data.labels >= 0
    blocks = [block.split(TILE_V, 1) for block in p.split(TILE_T)]
    likely = torch.tensor([[bool(tile.max() > FILTER_EPS) for tile in row] for row in blocks])
    assert likely.sum() > 6  # more than fit into one round of the smallest budget
    assert likely.any(1).tolist() == [True, True, False] and not likely.any(0).all()
    of_token = likely.repeat_interleave(TILE_T, 0)[: len(p)]
    of_label = of_token.gather(1, data.labels.clamp_min(0)[:, None] // TILE_V)[:, 0]
    alone, beside = (data.labels[counted & x] for x in (~of_label, of_label))
    assert alone.bincount().max() > 3, "several tokens share a label in an unlikely tile"
    assert set(alone.tolist()) & set(beside.tolist()), "which is a likely one of another block"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tile_that_is_not_kept_is_found(mutate, dtype):
    """In every case that filters; bf16 with many options may round more than dweight shows."""

    def a_tile_too_few(original: Callable[..., Any], *args: Any) -> Any:
        """Of block 1 the tile with the likely row 4 * 256 + 128."""
        kept, mass = original(*args)
        kept[1, 4] = False
        return kept, mass

    filtering = [case for case in CASES if case.filter_eps]
    assert not any(missed(case, dtype) for case in filtering)
    mutate(eager_filter, "kept_tiles", a_tile_too_few)
    for case in filtering:
        plain = case.variant.name == "filter_eps" or dtype != torch.bfloat16
        wanted = {"dhidden", "dweight"} if plain else {"dhidden"}
        assert missed(case, dtype) >= wanted, f"{case.variant.name}: {case.name}"


@pytest.mark.parametrize("name", ["kept_share", "rank_one_mass"])
def test_a_wrong_share_is_found(mutate, name):
    (case,) = (case for case in CASES if case.variant.metrics)
    assert missed(case, torch.float32) == set()

    def off(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        return out._replace(**{name: 1.001 * getattr(out, name)})

    mutate(verify_results, "linear_cross_entropy_with_metrics", off)
    assert missed(case, torch.float32) == {name}


def test_eps_0_that_filters_is_found(monkeypatch, capsys):
    """End to end: the line names the case."""

    def filtering(*args: Any, schedule: Any, **kwargs: Any) -> Tensor:
        if schedule == filtered.schedule(0.0):
            schedule = filtered.schedule(1e-9)
        return linear_cross_entropy(*args, schedule=schedule, **kwargs)

    monkeypatch.setattr(verify_results, "linear_cross_entropy", filtering)
    shape = ["--shapes", "16", "16", "32", "--schedules", "recompute"]
    assert verify.main(["--device", "cpu", "--dtypes", "fp32", *shape]) == 1
    (miss, verdict) = capsys.readouterr().out.splitlines()[-2:]
    start = "MISS fp32 (300, 128, 2100) filter_eps (mean), eps=0: same as recompute error"
    assert miss.startswith(start) and verdict.startswith("FAIL: ")
