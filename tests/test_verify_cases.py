"""The cases of ``launch.verify`` and their data: each is what its name says, and is called so."""

from collections import Counter
from typing import Any

import pytest
import torch

from flce_dist.launch.verify import __main__ as verify
from flce_dist.launch.verify import results as verify_results
from flce_dist.launch.verify.cases import (
    FILTER_EPS,
    Shape,
    cases,
    default_shapes,
    filtered_variants,
    part_cached_budget,
    score_variants,
    variants,
)
from flce_dist.launch.verify.checks import inputs_and_truths, make_truth, run_case
from flce_dist.launch.verify.data import make_data
from flce_dist.schedules.choose import choose_schedule
from tests.test_verify import CALLS

SCHEDULES: Any = ("recompute", "cached", "in_forward", "auto")


def test_every_schedule_reduction_and_option_has_a_case():
    found = [case for variant in variants() for case in cases(variant, SCHEDULES, 2, None)]
    plain = {(c.schedule, c.variant.reduction, c.sequence_parallel) for c in found}
    assert len(plain) == 4 * 3 * 2
    per_token = [c for c in found if c.variant.reduction == "none" and c.schedule == "in_forward"]
    assert {c.variant.trained for c in per_token} == {("hidden",)}
    options = {name for case in found for name, _ in case.variant.options}
    named = {"label_smoothing", "z_loss_weight", "softcap", "logit_scale", "temperature"}
    assert options == named
    assert {c.schedule for c in found if c.variant.uneven} == set(SCHEDULES)
    alone = [case for variant in variants() for case in cases(variant, SCHEDULES, 1, None)]
    assert not any(case.sequence_parallel for case in alone)


def test_filtered_gradients_have_cases_of_recompute():
    found = [case for x in filtered_variants() for case in cases(x, SCHEDULES, 2, None)]
    kinds = [(FILTER_EPS, None)] * 3 + [(FILTER_EPS, 1), (0.0, None)]
    for sp in (False, True):
        of_sp = [(c.filter_eps, c.max_logits_bytes) for c in found if c.sequence_parallel == sp]
        assert Counter(of_sp) == Counter(kinds)
    assert not list(cases(filtered_variants()[0], ("cached", "in_forward"), 1, None))


def test_a_case_is_called_as_it_says(mutate):
    """Its truth comes from the same options, so a wrong one would not show."""
    seen: list[dict[str, Any]] = []

    def spy(call, *args, **kwargs):
        seen.append(kwargs)
        return call(*args, **kwargs)

    for name in CALLS:
        mutate(verify_results, name, spy)
    for variant in variants():
        data = make_data(variant, Shape(8, 16, 32), 1, torch.float32, torch.device("cpu"), seed=0)
        truth = make_truth(data, variant, metric_gradients=False, filter_eps=None, P=1)
        for case in cases(variant, SCHEDULES, 1, 4096):
            run_case(case, data, truth, None, "eager")
            asked = seen.pop()
            options = {"reduction": variant.reduction, **dict(variant.options)}
            options |= {"schedule": case.schedule, "max_logits_bytes": case.max_logits_bytes}
            counted = int((data.labels != -100).sum())
            options["max_counted"] = counted if variant.counted else None
            options["skip_ignored"] = variant.skips
            options["impl"] = "eager"
            options["vocab_range"] = (0, len(data.weight)) if variant.uneven else None
            assert options.items() <= asked.items()
            assert ("bias" in asked) == variant.bias
            assert (asked["token_weight"] is not None) == variant.token_weight
            assert isinstance(asked.get("temperature"), torch.Tensor) == variant.tempered
            assert (asked.get("low_rank") is not None) == variant.low_rank
            assert asked["weight"].requires_grad == (
                "weight" in variant.trained and not variant.low_rank
            )
    assert not seen


@pytest.mark.parametrize("dtype", verify.DTYPES.values(), ids=str)
@pytest.mark.parametrize("P", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_what_is_called_part_cached_is(device_type, P, dtype):
    """On any number of ranks, at the wide shape; elsewhere it is, or there is no such case."""
    shapes = default_shapes(device_type, P)
    budgets = {shape: part_cached_budget(shape, P, dtype) for shape in shapes}
    assert budgets[shapes[-1]] is not None
    for shape, budget in budgets.items():
        if budget is None:
            continue
        T, V = -(-shape.T // P) * P, -(-shape.V_all // P)
        chosen = choose_schedule(
            T=T, V=V, itemsize=dtype.itemsize, schedule="cached", max_logits_bytes=budget,
            converts=dtype == torch.float16,
        )  # fmt: skip
        assert 0 < chosen.cached_v < V
    (plain, *_) = variants()
    assert not any(case.max_logits_bytes for case in cases(plain, ("cached",), P, None))


def test_data_hold_the_tokens_that_break_losses():
    shape, cpu = Shape(33, 64, 200), torch.device("cpu")
    data = make_data(variants()[0], shape, P=4, dtype=torch.float32, device=cpu, seed=0)
    assert data.hidden.shape == (36, 64)
    assert data.weight.shape == (200, 64)
    ignored = data.labels == -100
    assert 0 < ignored.sum() < 18
    assert data.hidden[ignored].isnan().all() and not data.hidden[~ignored].isnan().any()
    logits = data.hidden[~ignored] @ data.weight.T
    loss = torch.nn.functional.cross_entropy(logits, data.labels[~ignored], reduction="none")
    assert loss.max() > 100
    assert loss.min() < 0.1


def test_operands_that_need_no_gradient_are_frozen_where_the_op_is_called(mutate):
    """In every combination that adapters leave, for the loss and for scores."""
    seen: list[tuple[str, tuple[str, ...], Any]] = []

    def spy(call, *args, **kwargs):
        operands = {k: kwargs[k] for k in ("hidden", "weight", "bias") if k in kwargs}
        trained = tuple(name for name, x in operands.items() if x.requires_grad)
        seen.append((call.__name__, trained, kwargs["schedule"]))
        return call(*args, **kwargs)

    for name in CALLS[:3]:
        mutate(verify_results, name, spy)
    shape, cpu = Shape(16, 16, 32), torch.device("cpu")
    for variant in [*variants(), *score_variants()]:
        if variant.trained == ("hidden", "weight", "bias"):
            continue
        data, truth = inputs_and_truths(variant, shape, 1, torch.float32, cpu, seed=0)
        for case in cases(variant, SCHEDULES, 1, None):
            checks = run_case(case, data, truth(case.metric_gradients, None), None, "eager")
            assert all(check.met for check in checks.values())
            gradients = {name[1:] for name in checks if name in ("dhidden", "dweight", "dbias")}
            assert seen[-1][1] == variant.trained and gradients == set(variant.trained)
    trained_by = {
        name: {trained for call, trained, _ in seen if call == name} for name in CALLS[:3]
    }
    frozen = {("hidden",), ("weight",), ("bias",), ()}
    assert trained_by["linear_cross_entropy"] == trained_by["linear_logprob"] == frozen
    assert ("linear_logprob", ("hidden",), "in_forward") in seen
