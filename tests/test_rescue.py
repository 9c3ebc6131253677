"""Logits at the edge of the number range, and labels whose columns are banned."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flce_dist.kernels import primitives
from flce_dist.kernels.logits import rescue
from flce_dist.kernels.rows import formulas
from tests.problems import (
    DTYPES,
    IGNORE,
    METRICS,
    SCHEDULES,
    Inputs,
    Upstream,
    both,
    check,
    compare,
    each_dtype,
    each_schedule,
    everywhere,
    interpreted,
    make_inputs,
    metric_upstream,
    on_a_gpu,
    pairwise,
    per_token_upstream,
    run_op,
    with_logits,
)


def extreme_logits() -> dict[str, tuple[Tensor, Tensor]]:
    """``(logits [T, V], labels [T])`` by what is special; multiples of 1/8, exact in fp32."""
    g = torch.Generator().manual_seed(0)
    T, V = 9, 70
    noise = torch.randint(-16, 17, (T, V), generator=g) / 8
    labels = torch.randint(V, (T,), generator=g)
    at_label = F.one_hot(labels, V).bool()
    at_other = at_label.roll(1, dims=1)
    one_high = torch.zeros(T, V)
    one_high[:, 3] = 1e4
    return {
        "all -1e4": (torch.full((T, V), -1e4), labels),
        "one +1e4, not the label": (one_high, torch.where(labels == 3, 4, labels)),
        "one +1e4, the label": (one_high, torch.full_like(labels, 3)),
        "all equal": (torch.full((T, V), 2.0), labels),
        "all below -88": (noise - 120, labels),
        "all above 88": (noise + 120, labels),
        "label 45 below": (noise.masked_fill(at_other, 45.0), labels),
        "label 60 below": (noise.masked_fill(at_other, 60.0), labels),
        "label 200 below": (noise.masked_fill(at_other, 200.0), labels),
        "label at -1e4": (noise.masked_fill(at_label, -1e4), labels),
        "label 12 above": (noise.masked_fill(at_label, 12.0), labels),
        "label 1000 above": (noise.masked_fill(at_label, 1000.0), labels),
    }  # fmt: skip


EXTREME = extreme_logits()


@everywhere
@pytest.mark.parametrize(
    ("name", "schedule", "dtype"), pairwise(product(EXTREME, SCHEDULES, DTYPES)), ids=str
)
def test_extreme_logits(name, dtype, schedule, impl):
    z, labels = EXTREME[name]
    if dtype == torch.float16 and name in ("all below -88", "all above 88"):
        # dhidden is a sum of +-120 p that all but cancels: it magnifies the bf16 of fp16's cache.
        schedule = "recompute"
    inputs = with_logits(z, labels, dtype)
    results = run_op(inputs, Upstream(0.7), impl=impl, schedule=schedule, with_metrics=True)
    assert all(x.isfinite().all() for x in results.values())
    cancels = name in ("all -1e4", "all equal")
    if cancels:
        # sum_v dz_v * w_v is 0 for a constant w: only the rounding of its terms is left.
        dhidden = results.pop("dhidden").abs().max()
        assert dhidden <= torch.finfo(dtype).eps * z.abs().max()
    without = ("dhidden",) if cancels else ()
    compare(results, inputs, Upstream(0.7), with_metrics=True, without=without)


TERMS: dict[str, dict[str, Any]] = {
    "metrics": {"reduction": "none"},
    "z-loss": {"z_loss_weight": 1e-2},
    "smoothing": {"label_smoothing": 0.1},
}


@both
@pytest.mark.parametrize(
    ("name", "terms"),
    [*((name, "metrics") for name in EXTREME),
     *product(("all below -88", "label 60 below"), ("z-loss", "smoothing"))],
)  # fmt: skip
def test_other_terms_at_extreme_logits(name, terms, impl):
    z, labels = EXTREME[name]
    upstream = Upstream()
    if terms == "metrics":
        upstream = Upstream(None, metric_upstream(len(z), "lse", "logprob"))
    for schedule in ("recompute", "cached"):
        check(with_logits(z, labels), upstream, impl=impl, schedule=schedule, **TERMS[terms])


def banned(T: int, dtype: torch.dtype, value: float = -torch.inf) -> Inputs:
    """Three columns of ten banned by their bias, and so the labels of some tokens."""
    inputs = make_inputs(T, 150, 32, dtype, bias=True)
    assert inputs.bias is not None
    inputs.bias[torch.rand(150, generator=torch.Generator().manual_seed(1)) < 0.3] = value
    bans = inputs.bias[inputs.labels.clamp_min(0)] == value
    assert 0 < (bans & (inputs.labels != IGNORE)).sum() < T // 2
    return inputs


@both
@each_schedule
@each_dtype
def test_columns_banned_by_a_bias_of_minus_infinity(impl, schedule, dtype):
    """Probability 0 and gradient 0; at a label the loss is inf and its gradients as ever."""
    results = check(banned(37, dtype), impl=impl, schedule=schedule, with_metrics=True)
    assert results["loss"] == torch.inf
    assert all(results[name].isfinite().all() for name in ("dhidden", "dweight", "dbias"))


@both
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
@pytest.mark.parametrize("terms", [*TERMS, "softcap"])
def test_other_terms_with_banned_labels(impl, terms, schedule):
    inputs = replace(banned(37, torch.float32), token_weight=torch.linspace(0.5, 2.0, 37))
    metrics = metric_upstream(37, *METRICS) if terms == "metrics" else {}
    upstream = Upstream(per_token_upstream(37), metrics)
    options = {**TERMS.get(terms, {"softcap": 5.0}), "reduction": "none"}
    check(inputs, upstream, impl=impl, schedule=schedule, **options)


@both
@each_schedule
@pytest.mark.parametrize("value", [-1e5, -1e37])
def test_labels_banned_by_a_bias_of_a_large_number(impl, schedule, value):
    inputs = banned(37, torch.float32, value)
    inputs = replace(inputs, hidden=30 * inputs.hidden)  # logits to 200: a reference must be near
    check(inputs, impl=impl, schedule=schedule, reduction="sum")


@both
@pytest.mark.parametrize("label", [-3e6, -9e6])
def test_all_logits_below_any_reference(impl, label):
    z = -5e6 + torch.arange(70.0).repeat(4, 1)
    labels = torch.arange(4)
    z[torch.arange(4), labels] = label
    for schedule in ("recompute", "cached"):
        check(with_logits(z, labels), impl=impl, schedule=schedule, reduction="sum")


@both
def test_a_token_without_any_column_has_no_loss(impl):
    """As with PyTorch's logsumexp and cross_entropy."""
    inputs = make_inputs(8, 20, 16, bias=True, ignored=0.0)
    inputs.bias.fill_(-torch.inf)  # type: ignore[union-attr]
    results = run_op(inputs, Upstream(), impl=impl, with_metrics=True)
    assert results["lse"].isneginf().all()
    assert all(results[name].isnan().all() for name in ("loss", "logprob", "dhidden"))


MANY = 100  # tokens
TILE_T, TILE_V = 32, 64  # of the interpreter


def spread_out(rescued: list[int]) -> Inputs:
    """Tokens whose logits lie far apart: a label is the largest, or of ``rescued`` the smallest."""
    inputs = make_inputs(MANY, 100, 8, spread=40.0, ignored=0.0)
    hidden = 3 * F.normalize(inputs.hidden)
    z = hidden @ inputs.weight.T
    labels = z.argmax(1)
    labels[rescued] = z[rescued].argmin(1)
    below = z.amax(1) - z.gather(1, labels[:, None])[:, 0]
    assert (below > formulas.RESCUE_ABOVE + 1).nonzero()[:, 0].tolist() == rescued
    return replace(inputs, hidden=hidden, labels=labels)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []

    def coordinates(tile: Any, num_t: Any, num_v: Any, GROUP_T: Any) -> Any:
        pid_t, pid_v = primitives.tile_coordinates(tile, num_t, num_v, GROUP_T)
        seen.append((int(pid_t), int(pid_v)))
        return pid_t, pid_v

    monkeypatch.setattr(rescue, "tile_coordinates", coordinates)
    monkeypatch.setattr(rescue, "_LISTED_AT_ONCE", 64)  # by four programs
    return seen


@interpreted
def test_tokens_of_many_blocks_share_tiles(tiles):
    """Tokens of 4 blocks take one block's tiles, all tokens no more than all tiles."""
    for rescued in ([], list(range(3, MANY, TILE_T)), list(range(MANY))):
        tiles.clear()
        check(spread_out(rescued), impl="triton", schedule="cached", with_metrics=True)
        blocks = range(-(-len(rescued) // TILE_T))
        assert sorted(tiles) == list(product(blocks, range(-(-100 // TILE_V))))


@pytest.mark.parametrize("impl", ["triton", on_a_gpu])
def test_bits_do_not_depend_on_the_other_rescued_tokens(impl):
    """They move a token to another place in its tile, and its sums are added in another order."""
    few = [20, 50, 95]
    one, *others = (
        check(spread_out(rescued), impl=impl, with_metrics=True, reduction="none")
        for rescued in (few, list(range(0, MANY, 5)), list(range(MANY)))
    )
    for name in ("loss", *METRICS):
        assert all(torch.equal(one[name][few], other[name][few]) for other in others), name
