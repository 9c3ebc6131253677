"""What ``linear_divergence`` refuses, and which schedule and sizes it takes."""

from typing import Any

import pytest
import torch

from flce_dist import linear_divergence, linear_divergence_with_metrics
from flce_dist.divergence import choose
from flce_dist.divergence import schedule as schedules
from flce_dist.divergence.pair import Teacher
from flce_dist.filtered import schedule as filtered
from flce_dist.kernels.divergence.formulas import Measure
from tests.divergence_problem import H_T, H, T, V, problem

OF_TOKENS = (
    "must be finite and above 0 for each token that counts, got 0, infinity, NaN or a negative "
    "number at token 0"
)

# What each error says, and the arguments that cause it.
ERRORS: dict[str, dict[str, Any]] = {
    "kind must be one of ('forward_kl', 'reverse_kl', 'jsd', 'tv'), got 'kl'": {"kind": "kl"},
    "beta must be a float above 0 and below 1, got 1.0": {"kind": "jsd", "beta": 1.0},
    "teacher_softcap must be None or a float that is finite and above 0 in fp32, got 0.0": {
        "teacher_softcap": 0.0
    },
    "teacher_logit_scale must be a float that is finite and not 0 in fp32, got 0.0": {
        "teacher_logit_scale": 0.0
    },
    "teacher_temperature must be a float that is finite and above 0 in fp32, got 0.0": {
        "teacher_temperature": 0.0
    },
    f"teacher_temperature {OF_TOKENS}": {"teacher_temperature": torch.zeros(T)},
    f"temperature {OF_TOKENS}": {"temperature": torch.zeros(T)},
    f"teacher_rows must be [V] with V = {V} from weight, got (3,)": {
        "teacher_rows": torch.zeros(3).long()
    },
    "teacher_rows must be a torch.Tensor, got list: pass torch.as_tensor(teacher_rows)": {
        "teacher_rows": [0, 1]
    },
    "teacher_rows must hold data, got a tensor on device meta": {
        "teacher_rows": torch.arange(V, device="meta")
    },
    "teacher_rows must be a dense tensor (torch.strided), got torch.sparse_coo": {
        "teacher_rows": torch.arange(V).to_sparse()
    },
    f"teacher_rows must be within this rank's rows [0, {V}), got {[V] * 8} ...: "
    "use teacher_shard": {"teacher_rows": torch.full((V,), V)},
    f"labels must be ({T},) from hidden ({T}, {H}), got (3,)": {"labels": torch.zeros(3).long()},
    f"vocab_size must be within [1, {V}], the rows of 1 shards of {V}, got {V + 1}": {
        "vocab_size": V + 1
    },
    "schedule='in_forward' of a divergence needs a scalar upstream gradient, got "
    "reduction='none': use schedule='recompute' or 'cached'": {
        "schedule": "in_forward",
        "reduction": "none",
    },
    "a divergence needs schedule='auto', 'recompute', 'cached' or 'in_forward', got "
    "schedule=Filter(eps=0.0001)": {"schedule": filtered(eps=1e-4)},
    "teacher_hidden must be a torch.Tensor, got list: pass torch.as_tensor(teacher_hidden)": {
        "teacher_hidden": [0.0]
    },
    f"teacher_hidden must be ({T}, H) of the tokens of hidden, got ({T + 1}, {H_T})": {
        "teacher_hidden": torch.zeros(T + 1, H_T)
    },
    f"teacher_weight must be [V, H] with H = {H_T} from teacher_hidden, got ({V}, {H})": {
        "teacher_weight": torch.zeros(V, H)
    },
    f"teacher_weight must be [V, H] with H = {H_T} from teacher_hidden, got ({H_T}, {V}): if "
    "teacher_hidden holds logits, pass the output layer's input; if teacher_weight is [H, V], "
    "pass teacher_weight.T": {"teacher_weight": torch.zeros(H_T, V)},
    f"teacher_weight must have the {V} rows of weight, got ({V - 1}, {H_T}): pass vocab_size if "
    "the first ids are the same, else teacher_rows, the teacher's row of each id": {
        "teacher_weight": torch.zeros(V - 1, H_T)
    },
    f"teacher_weight must have the 40 rows of vocab_size, on 1 ranks 40 each, got (30, {H_T})": {
        "teacher_weight": torch.zeros(30, H_T),
        "vocab_size": 40,
    },
    "teacher_weight must have teacher_hidden's dtype torch.bfloat16, got torch.float32: pass "
    "teacher_weight.to(torch.bfloat16) or teacher_hidden.to(torch.float32), or call under "
    "torch.autocast": {"teacher_hidden": torch.zeros(T, H_T).bfloat16()},
    f"teacher_bias must be [V] with V = {V} from teacher_weight, got (3,)": {
        "teacher_bias": torch.zeros(3)
    },
    f"teacher_bias must be [V] with V = {V} from teacher_weight, got ({V + 9},)": {
        "teacher_bias": torch.zeros(V + 9),
        "teacher_rows": torch.arange(V),
    },
    "teacher_vocab_range must be half-open (start, end) with end - start = "
    f"{V} from teacher_weight, got (-5, {V - 5})": {
        "teacher_vocab_range": (-5, V - 5),
        "teacher_rows": torch.zeros(V).long(),
        "vocab_size": V,
    },
    f"teacher_temperature must be ({T},), as tokens, got ({T}, 1): pass "
    f"teacher_temperature.reshape(({T},))": {"teacher_temperature": torch.ones(T, 1)},
    f"teacher_vocab_range must be half-open (start, end) with end - start = {V} from "
    "teacher_weight, got (0, 30)": {"teacher_vocab_range": (0, 30), "vocab_size": V},
    "impl='triton' computes in float32, bfloat16 and float16; hidden is torch.float64: use "
    "impl='eager'": {"impl": "triton"},
}


def said(changes: dict[str, Any]) -> str:
    """What the error says of a call with these arguments."""
    given = problem(torch.float64 if "impl" in changes else torch.float32, bias=False)
    arguments = {**given.operands, **given.options, **changes}
    with pytest.raises((ValueError, NotImplementedError)) as error:
        linear_divergence(**arguments)
    return str(error.value)


@pytest.mark.parametrize("message", ERRORS)
def test_wrong_arguments(message: str) -> None:
    assert said(ERRORS[message]) == message


def test_keywords_of_other_losses() -> None:
    given = problem()
    for function in (linear_divergence, linear_divergence_with_metrics):
        for name in ("label_smoothing", "betta"):
            arguments: dict[str, Any] = {**given.operands, name: 0.1}
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
                function(**arguments)
    with pytest.raises(TypeError, match="Did you mean 'max_counted'"):
        linear_divergence(**{**given.operands, "max_count": 3})


def test_no_second_derivative_and_no_transforms() -> None:
    given = problem()
    hidden = given.hidden.nan_to_num().requires_grad_()
    operands = {**given.operands, "hidden": hidden}
    loss = linear_divergence(**operands, **given.options)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="linear_divergence does not support"):
        torch.func.grad(lambda x: linear_divergence(**{**operands, "hidden": x}))(hidden)


def test_a_teacher_that_is_changed_before_backward() -> None:
    given = problem(reduction="none", schedule="recompute")
    weight = given.weight.requires_grad_()
    loss = linear_divergence(**{**given.operands, "weight": weight}, **given.options)
    given.teacher_weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


@pytest.mark.parametrize("schedule", ["auto", "recompute"])
def test_compiled_code_breaks_its_graph_there(schedule: Any) -> None:
    given = problem()
    weight = given.weight.requires_grad_()
    operands = {**given.operands, "weight": weight}

    def loss() -> torch.Tensor:
        return linear_divergence(**operands, **given.options, schedule=schedule) * 2

    found = torch.compile(loss, backend="eager")()
    assert torch.equal(found, loss())


def sizes(T: int, V: int, **changes: Any) -> schedules.Divergence:
    nobody: Any = None
    facts: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "asked": "auto",
        "is_reduced": True,
        "needs_gradient": True,
        "max_logits_bytes": None,
        **changes,
    }
    measure = Measure("reverse_kl", 0.5)
    return choose.chosen_schedule(measure, Teacher(nobody, "", True), T=T, V=V, **facts)


def test_auto() -> None:
    kinds = (
        schedules.DivergenceInForward,
        schedules.DivergenceCached,
        schedules.DivergenceRecomputed,
    )
    assert type(sizes(8192, 128256)) is kinds[0]
    assert type(sizes(8192, 128256, is_reduced=False)) is kinds[1]
    assert type(sizes(8192, 128256, is_reduced=False, max_logits_bytes=1 << 30)) is kinds[2]
    assert type(sizes(1 << 20, 128256, is_reduced=False)) is kinds[2]
    assert type(sizes(8192, 128256, needs_gradient=False)) is schedules.Divergence


@pytest.mark.parametrize("V", [1, 1000, 16032, 128256, 262144])
@pytest.mark.parametrize("T", [0, 1, 100, 8192, 10000, 131072])
@pytest.mark.parametrize("asked", ["in_forward", "cached", "recompute"])
def test_logits_stay_within_the_budget(T: int, V: int, asked: str) -> None:
    for budget in (1 << 28, 1 << 30, 1 << 34):
        found = sizes(T, V, asked=asked, max_logits_bytes=budget)
        of_d = T if asked == "cached" else found.group_t
        held = V * (8 * found.chunk_t + 2 * of_d)
        least = V * (8 * 128 + 2 * (T if asked == "cached" else 128))
        assert held <= max(budget, least)
        whole = found.group_t in (found.chunk_t, T) or found.group_t % found.chunk_t == 0
        assert found.chunk_t >= 1 and (asked == "cached" or whole)


def test_sizes_fill_waves_and_add_to_dweight_seldom() -> None:
    found = sizes(8192, 128256)
    assert (found.chunk_t, found.group_t) == (640, 2560)  # 19 waves of 132 tiles, all but full
    assert found.dweight_dtype == torch.bfloat16
    many = sizes(65536, 128256)
    assert many.dweight_dtype == torch.float32 and many.group_t == 2560
    assert sizes(8192, 128256, dtype=torch.float16).dweight_dtype == torch.float32
