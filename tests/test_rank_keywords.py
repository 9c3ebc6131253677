"""Every keyword of every public function: one rank that differs, or is refused, ends all ranks.

T = 12 tokens, H = 8, two ranks with 10 rows each of the vocabulary.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flce_dist
from flce_dist import filtered
from flce_dist.testing import run_ranks

pytestmark = pytest.mark.usefixtures("ranks_compared")

T, H, V = 12, 8, 10
BEGINS = "ranks must call alike: "

# Of each keyword a value other than that of ``call``, and one that is refused.
VALUES: dict[str, tuple[Any, Any]] = {
    "reduction": ("sum", "max"),
    "ignore_index": (-1, 0.5),
    "label_smoothing": (0.1, 2.0),
    "z_loss_weight": (0.1, -1.0),
    "softcap": (3.0, 0.0),
    "logit_scale": (2.0, 0.0),
    "vocab_size": (2 * V - 1, 0),
    "vocab_range": ((0, V), (0, 1, 2)),
    "sequence_parallel": (True, 1),
    "sequence_dim": (1, 2),
    "reduce_dhidden": (False, None),
    "reduce_in_fp32": (True, None),
    "tp_invariant": (True, None),
    "accumulate_dweight": (True, None),
    "schedule": ("recompute", "fast"),
    "max_logits_bytes": (1, 0),
    "max_counted": (T - 1, 0),
    "skip_ignored": (True, None),
    "impl": ("triton", "cuda"),
    "bias": (torch.zeros(V), torch.zeros(1)),
    "low_rank": ((torch.ones(T, 2), torch.ones(V, 2)), (torch.ones(T, 2), torch.ones(V, 3))),
    "token_weight": (torch.ones(T), torch.ones(1)),
    "temperature": (torch.full((T,), 0.5), torch.ones(1)),
    "labels": (torch.arange(T).index_fill(0, torch.tensor(1), -100), torch.arange(T - 1)),
    # of scores and best ids
    "offsets": (torch.arange(T + 1), torch.arange(T)),
    "over": ("ids", "tokens"),
    "with_entropy": (True, None),
    "k": (3, 0),
    "top_p": (0.5, 2.0),
    "seed": (1, -1),
    "counters": (torch.arange(T).flip(0), torch.arange(T - 1)),
    # of divergences
    "kind": ("jsd", "kl"),
    "beta": (0.25, 1.0),
    "teacher_bias": (torch.zeros(V), torch.zeros(1)),
    "teacher_temperature": (0.5, -1.0),
    "teacher_softcap": (3.0, 0.0),
    "teacher_logit_scale": (2.0, 0.0),
    "teacher_rows": (None, torch.zeros(1)),
    "teacher_vocab_range": (None, (0, 1, 2)),
}
# Ranks may differ in these: in what is of their own rows or tokens, or changes nothing here.
OF_A_RANK = {
    ("data_parallel_linear_cross_entropy", "labels"),
    *(
        (f"linear_divergence{suffix}", name)
        for name in ("teacher_rows", "teacher_vocab_range", "ignore_index")
        for suffix in ("", "_with_metrics")
    ),
}
_GROUPS = {"tp_group", "data_group"}
_TENSORS = {"hidden", "weight", "ids", "teacher_hidden", "teacher_weight"}
# What an error says where that is not the keyword's own name.
_SAID = {
    "low_rank": "columns of low_rank is ",
    "max_counted": "plan is",
    "over": "plan is 'OverVocabulary",
    "sequence_parallel": "from hidden (12, 8)",
    "sequence_dim": "sequence_",
    "counters": "hash of counters is",
    "with_entropy": "with_metrics is",
    "teacher_bias": "bias True",
    "teacher_softcap": "softcap 3.0",
    "teacher_logit_scale": "logit_scale 2.0",
}

FUNCTIONS: dict[str, dict[str, Any]] = {
    "linear_cross_entropy": {"labels": torch.arange(T)},
    "linear_cross_entropy_with_metrics": {"labels": torch.arange(T)},
    "data_parallel_linear_cross_entropy": {"labels": torch.arange(T) % V},
    "linear_logprob": {"ids": torch.arange(T)[:, None]},
    "linear_divergence": {"teacher_hidden": torch.ones(T, H), "teacher_temperature": 0.6},
    "linear_divergence_with_metrics": {
        "teacher_hidden": torch.ones(T, H),
        "teacher_temperature": 0.6,
    },
    "linear_top_k": {"k": 2, "labels": torch.arange(T)},
    "linear_sample": {"seed": 0},
}


def call(function: str, group: dist.ProcessGroup) -> dict[str, Any]:
    g = torch.Generator().manual_seed(group.rank())
    needs = function not in ("linear_top_k", "linear_sample")
    arguments = {
        "hidden": torch.ones(T, H, requires_grad=needs),
        "weight": torch.randn(V, H, generator=g).requires_grad_(needs),
        **FUNCTIONS[function],
    }
    if "divergence" in function:
        arguments["teacher_weight"] = torch.randn(V, H, generator=g)
    name = "data_group" if function.startswith("data") else "tp_group"
    return arguments | {name: group}


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """The keywords of a function, also those of ``**options``, but tensors that always differ."""
    names: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            (options,) = parameter.annotation.__args__
            names += sorted(options.__required_keys__ | options.__optional_keys__)
        elif name in VALUES:
            names.append(name)
        else:
            assert name in {*_GROUPS, *_TENSORS}, name
    return names


def said(function: str, group: dist.ProcessGroup, changes: dict[str, Any]) -> str:
    """The error of a call that rank 1 makes with ``changes``."""
    mine = call(function, group) | (changes if group.rank() == 1 else {})
    try:
        getattr(flce_dist, function)(**mine)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def on_both(function: str, changes: dict[str, Any]) -> list[str]:
    return run_ranks(lambda group: said(function, group, changes), 2)


CASES = [
    (function, keyword)
    for function in FUNCTIONS
    for keyword in keywords_of(getattr(flce_dist, function))
]


@pytest.mark.parametrize(("function", "keyword"), [case for case in CASES if case not in OF_A_RANK])
def test_a_value_that_differs_is_named(function, keyword):
    first, second = on_both(function, {keyword: VALUES[keyword][0]})
    assert first.startswith(BEGINS) and first.endswith(second), (first, second)
    assert keyword in first or _SAID.get(keyword, keyword) in first, first


@pytest.mark.parametrize(("function", "keyword"), CASES)
def test_a_value_that_one_rank_refuses_raises_on_all(function, keyword):
    first, second = on_both(function, {keyword: VALUES[keyword][1]})
    assert first.startswith(f"{BEGINS}rank 1 raised ") and first.endswith(second)
    assert keyword in second


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("changes", [
    {"reductoin": "sum"},
    {"function": 1},
    {"temperature": -1.0},
    {"temperature": "warm"},
    {"hidden": [1.0]},
], ids=str)  # fmt: skip
def test_what_one_rank_misspells_raises_on_all(function, changes):
    first, second = on_both(function, changes)
    assert first.startswith(f"{BEGINS}rank 1 raised ") and first.endswith(second)
    assert next(iter(changes)) in second


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("how", ["forgotten", "forgotten by name", "too many", "twice"])
def test_arguments_of_one_rank_that_python_refuses_raise_on_all(function, how):
    """Before the function begins, that is."""

    def rank(group: dist.ProcessGroup) -> str:
        kwargs = call(function, group)
        args: list[Any] = []
        if group.rank() == 1:
            if "by name" not in how:
                args = [kwargs.pop("hidden"), kwargs["weight"]]
            if how != "twice":
                del kwargs["weight"]
            if how == "forgotten":
                del args[1]
            if how == "too many":
                args += [None] * 9
        try:
            getattr(flce_dist, function)(*args, **kwargs)
        except (TypeError, ValueError) as error:
            return str(error)
        return ""

    first, second = run_ranks(rank, 2)
    assert first.startswith(f"{BEGINS}rank 1 raised TypeError: ") and first.endswith(second)
    assert f"{function}()" in second and ("weight" in second or how == "too many")


@pytest.mark.parametrize("method", ["forward", "forward_with_metrics"])
@pytest.mark.parametrize("wrong", [{}, {"labels": torch.arange(T), "weight": None}], ids=str)
def test_arguments_that_a_layer_refuses_on_one_rank_raise_on_all(method, wrong):
    def rank(group: dist.ProcessGroup) -> str:
        layer = flce_dist.LinearCrossEntropy(H, 2 * V, tp_group=group)
        arguments = wrong if group.rank() == 1 else {"labels": torch.arange(T)}
        try:
            getattr(layer, method)(torch.ones(T, H), **arguments)
        except (TypeError, ValueError) as error:
            return str(error)
        return ""

    first, second = run_ranks(rank, 2)
    assert first.startswith(f"{BEGINS}rank 1 raised TypeError: ") and first.endswith(second)
    assert f"{method}()" in second and ("labels" in second or "weight" in second)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_temperature_below_0_on_one_rank_raises_on_all(function):
    temperature = torch.ones(T).index_fill(0, torch.tensor(3), -1.0)

    def rank(group: dist.ProcessGroup) -> str:
        changes = {"temperature": temperature if group.rank() == 1 else torch.ones(T)}
        try:
            getattr(flce_dist, function)(**call(function, group) | changes)
        except ValueError as error:
            return str(error)
        return ""

    first, second = run_ranks(rank, 2)
    assert first == second and "temperature" in first


@pytest.mark.parametrize("function", FUNCTIONS)
def test_calls_that_are_alike_pass(function):
    assert on_both(function, {}) == ["", ""]


def test_filtered_schedules_of_other_bounds_are_named():
    first, second = on_both("linear_cross_entropy", {"schedule": filtered.schedule(0.25)})
    assert first == second and first.startswith(f"{BEGINS}schedule is ")
