"""The cases and data of ``launch.verify``."""

from typing import Any

import pytest
import torch

from flce_dist.launch.verify import __main__ as verify
from flce_dist.launch.verify.cases import Shape, cases, default_shapes, part_cached_budget, variants
from flce_dist.launch.verify.checks import make_truth, run_case
from flce_dist.launch.verify.data import make_data
from flce_dist.op import prepare
from flce_dist.op.plan import Plan, plan


def test_every_schedule_reduction_and_option_has_a_case():
    schedules: Any = ("recompute", "cached", "in_forward", "auto")
    found = [case for variant in variants() for case in cases(variant, schedules, 2, None)]
    plain = {(c.schedule, c.variant.reduction, c.sequence_parallel) for c in found}
    assert len(plain) == 4 * 3 * 2 - 2  # in_forward has no reduction="none"
    options = {name for case in found for name, _ in case.variant.options}
    assert options == {"label_smoothing", "z_loss_weight", "softcap", "logit_scale"}
    assert {c.schedule for c in found if c.variant.uneven} == set(schedules)
    alone = [case for variant in variants() for case in cases(variant, schedules, 1, None)]
    assert not any(case.sequence_parallel for case in alone)


@pytest.mark.parametrize("dtype", verify.DTYPES.values(), ids=str)
def test_a_part_is_really_cached_by_default(dtype, mutate):
    """Whatever the window takes of a budget: columns are cached and others recomputed."""
    *_, wide = default_shapes("cpu", 1)
    (plain, *_) = variants()
    (_, part) = cases(plain, ("cached",), 1, part_cached_budget(wide, 1, dtype))
    seen: list[Plan] = []

    def spy(plan, **kwargs):
        seen.append(plan(**kwargs))
        return seen[-1]

    mutate(prepare, "plan", spy)
    data = make_data(plain, wide, 1, dtype, torch.device("cpu"), seed=0)
    truth = make_truth(data, plain, metric_gradients=False, filter_eps=None, P=1)
    assert all(check.met for check in run_case(part, data, truth, None, None).values())
    (chosen,) = seen
    assert (chosen.T, chosen.V) == (wide.T, wide.V_all)
    assert 0 < chosen.cached_v < chosen.V


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
        chosen = plan(
            T=T, V=V, itemsize=dtype.itemsize, schedule="cached", max_logits_bytes=budget,
            converts=dtype == torch.float16,
        )  # fmt: skip
        assert 0 < chosen.cached_v < V
    (plain, *_) = variants()
    assert not any(case.max_logits_bytes for case in cases(plain, ("cached",), P, None))


def test_data_hold_the_tokens_that_break_losses():
    data = make_data(
        variants()[0], Shape(33, 64, 200), P=4, dtype=torch.float32, device=torch.device("cpu"),
        seed=0,
    )  # fmt: skip
    assert data.hidden.shape == (36, 64)
    assert data.weight.shape == (200, 64)
    ignored = data.labels == -100
    assert 0 < ignored.sum() < 18
    assert data.hidden[ignored].isnan().all() and not data.hidden[~ignored].isnan().any()
    logits = data.hidden[~ignored] @ data.weight.T
    loss = torch.nn.functional.cross_entropy(logits, data.labels[~ignored], reduction="none")
    assert loss.max() > 100
    assert loss.min() < 0.1
