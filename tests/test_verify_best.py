"""What ``launch.verify`` finds wrong in best ids, ranks and samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flce_dist.launch.verify import best as verify_best
from flce_dist.launch.verify.cases import Case, Shape, best_variants
from flce_dist.launch.verify.checks import make_truth, run_case
from flce_dist.launch.verify.data import make_data

SHAPE = Shape(24, 64, 200)


def misses(variant: Any) -> set[str]:
    """Names of the checks that fail, of one process in fp32."""
    data = make_data(variant, SHAPE, 1, torch.float32, torch.device("cpu"), 0)
    truth = make_truth(data, variant, False, None, 1)
    checks = run_case(Case(variant, "auto", False), data, truth, None, "eager")
    assert len(checks) >= 6
    return {name for name, budget in checks.items() if not budget.met}


def exchanged(found: Any) -> Any:
    ids = found.ids.clone()
    ids[3, :2] = ids[3, :2].flip(0)
    return found._replace(ids=ids)


@pytest.mark.parametrize("wrong, name", [
    (lambda x: x._replace(label_rank=x.label_rank + 1), "places"),
    (lambda x: x._replace(label_rank=x.label_rank.where(x.label_rank >= 0, 0)), "places"),
    (lambda x: x._replace(lse=x.lse * 1.0001), "lse"),
    (lambda x: x._replace(logprob=x.logprob * 1.0001), "logprob"),
    (lambda x: x._replace(label_logprob=x.label_logprob * 1.0001), "label_logprob"),
    (exchanged, "ids"),
    (lambda x: x._replace(ids=x.ids[:, :1].expand_as(x.ids)), "places"),
])  # fmt: skip
def test_a_fault_of_best_ids_is_found(
    mutate: Callable[..., None], wrong: Callable[[Any], Any], name: str
) -> None:
    _, many = best_variants()
    assert misses(many) == set()
    mutate(verify_best, "linear_top_k", lambda call, *args, **given: wrong(call(*args, **given)))
    assert name in misses(many)


def test_a_fault_of_samples_is_found(mutate: Callable[..., None]) -> None:
    one, _ = best_variants()
    assert misses(one) == set()

    def first_id(call: Any, *args: Any, **given: Any) -> Any:
        found = call(*args, **given)
        return found._replace(ids=found.ids.clamp_max(0))

    mutate(verify_best, "linear_sample", first_id)
    assert "drawn" in misses(one)
