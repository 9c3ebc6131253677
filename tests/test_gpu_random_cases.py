"""Random calls on a GPU, by one rank and by two; random_cases.py draws and compares them.

Almost every combination of options compiles kernels of its own, for seconds. So there are few, and
what is drawn is what the kernels of one combination take: sizes, data, masks, rows without tokens.
Two ranks are threads with tensors on one GPU; tests/gpu_parallel.py has a GPU for each.
"""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from flce_dist import filtered
from tests.devices import CUDA
from tests.random_cases import SETTINGS, Drawn, check_on_ranks

pytestmark = pytest.mark.usefixtures("one_launch_at_a_time")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMOOTH, Z_LOSS = ("label_smoothing", 0.1), ("z_loss_weight", 1e-2)
CAPPED, SCALED = ("softcap", 3.0), ("logit_scale", -1.3)
FEW_BYTES = ("max_logits_bytes", 4096)  # the smallest windows and chunks

FIXTURES_STAY = SETTINGS | {"suppress_health_check": list(HealthCheck)}  # as one_launch_at_a_time

# Each dtype by each schedule; a hidden size or layout that descriptors refuse reads by pointers.
COMBINATIONS: dict[str, dict[str, Any]] = {
    "bf16 recompute": {"dtype": BF16, "H": 64, "options": (SMOOTH, Z_LOSS), "how": (FEW_BYTES,)},
    "bf16 cached": {"dtype": BF16, "H": 64, "reduction": "none", "metric_gradients": True},
    "bf16 in_forward": {"dtype": BF16, "H": 37, "reduction": "sum", "options": (Z_LOSS,)},
    "bf16 auto": {"dtype": BF16, "H": 64, "bias": False, "layouts": ("columns", "transposed")},
    "fp16 recompute": {"dtype": FP16, "H": 64, "reduction": "none", "options": (CAPPED, SCALED)},
    "fp16 cached": {"dtype": FP16, "H": 64, "token_weight": True, "options": (SMOOTH,)},
    "fp16 in_forward": {"dtype": FP16, "H": 37, "how": (FEW_BYTES,)},
    "fp32 recompute": {"dtype": FP32, "H": 37, "metric_gradients": True, "options": (SMOOTH,)},
    "fp32 cached": {"dtype": FP32, "H": 64, "reduction": "sum", "options": (Z_LOSS, SCALED)},
    "fp32 auto": {"dtype": FP32, "H": 64, "layouts": ("every second", "plain")},
}
# All that there is of so few columns as in NOTHING is kept, so gradients are still exact.
FILTERED: dict[str, dict[str, Any]] = {
    "bf16 filtered": {"dtype": BF16, "H": 64, "options": (SMOOTH, Z_LOSS)},
    "fp16 filtered": {"dtype": FP16, "H": 64},
}


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Of several tiles, partly filled; also no tokens, and a rank with rows of padding alone.

    None but 0 is a multiple of 16, nor 1, for which Triton compiles anew.
    """
    P = draw(st.sampled_from([1, 2]))
    return {
        "P": P,
        "sequence_parallel": P == 2 and draw(st.booleans()),
        "tokens": draw(st.sampled_from([0, 5, 37, 150])),
        "batch": draw(st.sampled_from([1, 3])),
        "V_all": draw(st.sampled_from([7, 61, 507, 1203])),
        "padding": draw(st.sampled_from([0, 0, 19])),
        "int32_labels": draw(st.booleans()),
        "ignored": draw(st.sampled_from([0.0, 0.2, 1.0])),
        "seed": draw(st.integers(0, 1000)),
    }


def call(name: str, drawn: dict[str, Any]) -> Drawn:
    schedule = name.split()[1]
    how = "schedule", filtered.schedule(2.0**-9) if schedule == "filtered" else schedule
    chosen = {**COMBINATIONS, **FILTERED}[name]
    return Drawn(**{**chosen, **drawn, "how": (how, *chosen.get("how", ()))})


NO_TOKENS = {"tokens": 0, "batch": 3, "V_all": 61}
NO_ROWS = {"P": 2, "tokens": 37, "batch": 1, "V_all": 7, "padding": 19}  # 13 and 13
NOTHING = [
    NO_TOKENS,
    {**NO_TOKENS, "P": 2},
    {**NO_TOKENS, "P": 2, "sequence_parallel": True},
    NO_ROWS,
    {**NO_ROWS, "sequence_parallel": True},
]


@pytest.mark.parametrize(
    ("device", "impl"), [("cpu", "eager"), pytest.param("cuda", "triton", marks=CUDA.marks)]
)
@pytest.mark.parametrize("name", [*COMBINATIONS, *FILTERED])
def test_nothing_to_compute(name: str, device: str, impl: str) -> None:
    for drawn in NOTHING:
        check_on_ranks(call(name, drawn), impl, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMBINATIONS)
@settings(max_examples=24, **FIXTURES_STAY)
@given(sizes())
def test_random_calls(name: str, drawn: dict[str, Any]) -> None:
    check_on_ranks(call(name, drawn), "triton", "cuda")
