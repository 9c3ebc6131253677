"""Each error of checks.py about options, word by word."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from flce_dist import filtered, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.op import checks
from flce_dist.options import DECLARED, LossOptions
from tests.check_arguments import H, T, V, arguments

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
    "schedule": ("one of ('auto', 'recompute', 'cached', 'in_forward')", [*NAMES, None]),
    "max_logits_bytes": ("None or an int within [1, 2**63)", [*INTS, 0, -1]),
    "impl": ("one of ('triton', 'eager', None)", [*NAMES, "cuda"]),
}  # fmt: skip

# (changed arguments, whole message), by the function of checks.py that complains.
OPTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"sequence_parallel": True, "reduce_dhidden": False},
        "reduce_dhidden=False leaves the sum over ranks to the caller, but "
        "sequence_parallel=True makes it part of the reduce-scatter; drop one of the two",
    ),
    (
        {"reduce_in_fp32": True, "reduce_dhidden": False},
        "reduce_in_fp32=True sums dhidden over ranks in fp32, but reduce_dhidden=False leaves "
        "the sum over ranks to the caller; drop one of the two",
    ),
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"schedule": "in_forward", "reduction": "none"},
        "schedule='in_forward' needs a scalar upstream gradient, so reduction='none' needs "
        "schedule='recompute' or 'cached'",
    ),
    *(
        (
            {"schedule": schedule, "softcap": 5.0, "label_smoothing": 0.1},
            f"schedule='{schedule}' keeps exponentials, but label_smoothing with softcap needs the "
            "logits; use schedule='recompute'",
        )
        for schedule in ("cached", "in_forward")
    ),
    (
        {"schedule": filtered.schedule(0.0), "softcap": 5.0},
        "filtered.schedule needs softcap=None, since a softcap's slope differs between the columns "
        "of a tile, got softcap=5.0",
    ),
    (
        {"schedule": filtered.schedule(0.1), "tp_invariant": True},
        "filtered.schedule needs tp_invariant=False, since tiles are counted from the first row of "
        "each rank, got tp_invariant=True",
    ),
    (
        {"impl": "triton", "hidden": torch.zeros(T, H).double(),
         "weight": torch.zeros(V, H).double()},
        "impl='triton' computes in float32, bfloat16 and float16; hidden is torch.float64: "
        "use impl='eager'",
    ),
]  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_option_of_another_type_or_beyond_its_range(name: str) -> None:
    words, values = WRONG[name]
    for value in [*values, *ANYTHING]:
        shown = "a Tensor" if isinstance(value, torch.Tensor) else repr(value)
        with pytest.raises(ValueError) as error:
            linear_cross_entropy(**arguments(**{name: value}))
        assert str(error.value) == f"{name} must be {words}, got {shown}"


def test_every_option_has_wrong_values_here() -> None:
    assert {*WRONG, "with_metrics"} == {*DECLARED}


def test_numbers_of_numpy_are_as_good() -> None:
    """The same result, and plain numbers in what travels on: a plan, a compiled operator."""
    plain: dict[str, Any] = dict(
        ignore_index=-1, label_smoothing=0.5, z_loss_weight=0.25, softcap=None, logit_scale=2.0,
        vocab_size=9, vocab_range=(0, 11), max_logits_bytes=4096,
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
    hidden = torch.randn(T, H)
    losses = [linear_cross_entropy(**arguments(hidden=hidden, **x)) for x in (plain, numpy)]
    assert torch.equal(*losses)


@pytest.mark.parametrize("call", [linear_cross_entropy, linear_cross_entropy_with_metrics])
@pytest.mark.parametrize(("changes", "message"), OPTIONS, ids=[m for _, m in OPTIONS])
def test_options_that_contradict_each_other(
    changes: dict[str, Any], message: str, call: Any
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(**arguments(**changes))


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_combinations_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        linear_cross_entropy(**arguments(**changes))


@pytest.mark.parametrize("eps", [*FLOATS, None, -0.1, 1, 1.0, ""], ids=str)
def test_thresholds_that_no_probability_has(eps: Any) -> None:
    words = re.escape(f"eps of filtered.schedule must be a float within [0, 1), got {eps}")
    with pytest.raises(ValueError, match=f"^{words}$"):
        filtered.schedule(eps)
    with pytest.raises(ValueError, match=f"^{words}$"):
        linear_cross_entropy(**arguments(schedule=f"filtered:{eps}"))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_what_is_refused_names_a_schedule_that_works(reduction: str) -> None:
    tied = {"softcap": 5.0, "label_smoothing": 0.1, "reduction": reduction}
    for schedule in ("recompute", "auto"):
        linear_cross_entropy(**arguments(schedule=schedule, **tied)).backward()
