"""Values of options that checks.py refuses, and those that it takes."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from flce_dist import filtered, linear_cross_entropy
from flce_dist.op import checks
from flce_dist.options import DECLARED, LossOptions
from tests.parallel_problem import complaint
from tests.test_checks import arguments

NAN, INF = float("nan"), float("inf")
INTS: list[Any] = [True, 1.0, 1e9, 1 << 63, 1 << 70]  # that no option is
FLOATS: list[Any] = [True, NAN, INF, -INF, 1e300, 10**400, 1j, np.float64("nan")]
FLAGS: list[Any] = [None, 0, 1, 1.0, np.True_]
NAMES: list[Any] = ["", "fast", "Mean", ("mean",), 0, True]
ANYTHING: list[Any] = ["1", b"1", [1], torch.ones(()), torch.ones(3), object]

# What each option must be, and values that are not.
WRONG: dict[str, tuple[str, list[Any]]] = {
    "reduction": ("one of ('none', 'sum', 'mean')", [*NAMES, None]),
    "ignore_index": ("an int within [-2**63, 2**63)", [*INTS, None, -(1 << 63) - 1]),
    "label_smoothing": ("a float within [0, 1]", [*FLOATS, None, -0.1, 1.5, 2]),
    "z_loss_weight": ("a float that is finite in fp32", [*FLOATS, None]),
    "softcap": (
        "None or a float that is finite and above 0 in fp32", [*FLOATS, 0, 0.0, -2.0, 1e-300]
    ),
    "logit_scale": ("a float that is finite and not 0 in fp32", [*FLOATS, None, 0, 0.0, 1e-300]),
    "vocab_size": ("None or an int within [1, 2**63)", [*INTS, 0, -1]),
    "vocab_range": (
        "None or (start, end)", [11, (0,), (0, 5, 11), (0.0, 11.0), (False, True), "ab"]
    ),
    "sequence_parallel": ("a bool", FLAGS),
    "sequence_dim": ("an int that is 0 or 1", [*INTS, None, -1, 2]),
    "reduce_dhidden": ("a bool", FLAGS),
    "reduce_in_fp32": ("a bool", FLAGS),
    "tp_invariant": ("a bool", FLAGS),
    "accumulate_dweight": ("a bool", FLAGS),
    "skip_ignored": ("a bool", FLAGS),
    "schedule": ("one of ('auto', 'recompute', 'cached', 'in_forward')", [*NAMES, None]),
    "max_logits_bytes": ("None or an int within [1, 2**63)", [*INTS, 0, -1]),
    "max_counted": ("None or an int within [1, 2**63)", [*INTS, 0, -1]),
    "impl": ("one of ('triton', 'eager', None)", [*NAMES, "cuda"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_option_of_another_type_or_beyond_its_range(name: str) -> None:
    words, values = WRONG[name]
    complaint(linear_cross_entropy, **arguments(vocab_range=(0, 11)))  # equal to (0.0, 11.0)
    for value in [*values, *ANYTHING]:
        shown = "a Tensor" if isinstance(value, torch.Tensor) else repr(value)
        said = complaint(linear_cross_entropy, **arguments(**{name: value}))
        assert said == f"{name} must be {words}, got {shown}"


def test_every_option_has_wrong_values_here() -> None:
    assert {*WRONG, "with_metrics"} == {*DECLARED}


def test_numbers_of_numpy_are_as_good() -> None:
    """What travels on, to a plan or a compiled operator, are plain numbers."""
    plain: dict[str, Any] = dict(
        ignore_index=-1, label_smoothing=0.5, z_loss_weight=0.25, softcap=None, logit_scale=2.0,
        vocab_size=9, vocab_range=(0, 11), max_logits_bytes=4096, max_counted=5,
    )  # fmt: skip
    numpy = {
        name: np.int32(x) if isinstance(x, int) else np.float32(x)
        for name, x in plain.items()
        if isinstance(x, int | float)
    }
    numpy["vocab_range"] = [np.int64(0), np.uint8(11)]
    options = checks.check_options(LossOptions(**numpy))
    assert options == LossOptions(**plain)
    assert repr(options) == repr(LossOptions(**plain))


@pytest.mark.parametrize("eps", [*FLOATS, None, -0.1, 1, 1.0, ""], ids=str)
def test_thresholds_that_no_probability_has(eps: Any) -> None:
    words = re.escape(f"eps of filtered.schedule must be a float within [0, 1), got {eps}")
    with pytest.raises(ValueError, match=f"^{words}$"):
        filtered.schedule(eps)
    with pytest.raises(ValueError, match=f"^{words}$"):
        linear_cross_entropy(**arguments(schedule=f"filtered:{eps}"))
