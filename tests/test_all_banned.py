"""Tokens of whom a bias of -inf bans each id: what PyTorch gives of such a row, on every way.

Of logits that are all -inf the log-sum-exp is -inf, and log-probabilities and entropy are NaN.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import linear_cross_entropy_with_metrics, linear_logprob, linear_top_k
from flce_dist.reference import (
    reference_linear_cross_entropy,
    reference_linear_logprob,
    reference_linear_top_k,
)
from flce_dist.testing import run_ranks
from tests.best_problem import close
from tests.outcomes import Outcome
from tests.problems import (
    Inputs,
    Upstream,
    both,
    device_of,
    each_dtype,
    metric_upstream,
    run_op,
)
from tests.score_problem import Scored, of_ranks, run_reference, run_scores

WAYS = ("over ids", "over the vocabulary", "loss", "top_k")
T, V, H, K = 5, 48, 16, 3
BANNED = slice(4)  # token 0 has no other id, token 1 one more, and token 2 none of these
IDS = torch.tensor([[2, 1, 2], [3, -1, 40], [30, 4, 17], [-1, -1, -1], [25, 24, 1]])
LABELS = torch.tensor([2, 40, 4, -1, 25])
RANKS = {"one": (), "even": (24,), "one shard banned": (4,), "one shard empty": (0,)}

pytestmark = pytest.mark.usefixtures("one_launch_at_a_time")
each_way = pytest.mark.parametrize("way", WAYS)


def operands(*, every_id: bool) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    bias = torch.randn(V, generator=g)
    bias[slice(None) if every_id else BANNED] = -torch.inf
    hidden = torch.randn(T, H, generator=g)
    hidden[3] = torch.nan  # of an ignored token
    return hidden, torch.randn(V, H, generator=g), bias


def function_of(way: str) -> Any:
    of_labels = {"loss": linear_cross_entropy_with_metrics, "top_k": linear_top_k}
    return of_labels.get(way, linear_logprob)


def found(way: str, impl: Any, hidden: Tensor, weight: Tensor, **options: Any) -> Outcome:
    """What the function of ``way`` returns, on the CPU, from the device of ``impl``."""
    device = device_of(impl)

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    ids = moved(options.pop("ids", IDS))
    labels = LABELS.to(device)
    options = {name: moved(x) for name, x in options.items()}
    call = partial(function_of(way), hidden.to(device), weight.to(device), impl=impl, **options)
    if way == "top_k":
        with torch.no_grad():
            of_call = call(k=K, labels=labels, ignore_index=-1)
    elif way == "loss":
        of_call = call(labels=labels, reduction="none", ignore_index=-1)
    else:
        of_call = call(ids=ids, over=way.split()[-1], with_entropy=True)
    return Outcome({name: x.cpu() for name, x in of_call._asdict().items() if x is not None})


def truth(way: str, hidden: Tensor, weight: Tensor, **options: Any) -> Outcome:
    """The reference's, in fp64."""
    for ours in ("schedule", "max_counted", "skip_ignored"):
        options.pop(ours, None)
    ids = options.pop("ids", IDS)
    options["bias"] = options["bias"].double()
    operands = hidden.double(), weight.double()
    if way == "top_k":
        names: tuple[str, ...] = ("ids", "logprob", "lse", "label_logprob", "label_rank")
        results: Any = reference_linear_top_k(
            *operands, K, labels=LABELS, ignore_index=-1, **options
        )
    elif way == "loss":
        names = ("loss", "lse", "logprob", "entropy", "correct")
        results = reference_linear_cross_entropy(
            *operands, LABELS, reduction="none", ignore_index=-1, **options
        )
    else:
        names = ("logprob", "lse", "other", "entropy")
        results = reference_linear_logprob(*operands, ids, over=way.split()[-1], **options)
    every = Outcome(zip(names, results, strict=True))
    return every.without("other") if way == "over ids" else every


def compare(results: Outcome, right: Outcome) -> None:
    assert results.keys() == right.keys()
    for name, x in results.items():
        close(x.float(), right[name].double())


@both
@each_way
@pytest.mark.parametrize("every_id", [False, True], ids=["some", "every"])
@pytest.mark.parametrize("ranks", RANKS)
def test_scores_are_those_of_pytorch(impl: str, way: str, every_id: bool, ranks: str) -> None:
    hidden, weight, bias = operands(every_id=every_id)
    right = truth(way, hidden, weight, bias=bias)
    cuts = RANKS[ranks]

    def one(group: dist.ProcessGroup) -> Outcome:
        rows = ((0, *cuts)[group.rank()], (*cuts, V)[group.rank()])
        mine = {"bias": bias[slice(*rows)], "vocab_size": V, "vocab_range": rows}
        return found(way, impl, hidden, weight[slice(*rows)], tp_group=group, **mine)

    for results in run_ranks(one, len(cuts) + 1):
        compare(results, right)


TEMPERATURE = torch.tensor([0.5, 1.0, 2.0, torch.nan, 1.5])
CSR = {
    "ids": torch.tensor([2, 1, 2, 3, -1, 40, 30, 4, 17, 25, 24, 1]),
    "offsets": torch.tensor([0, 3, 6, 9, 9, 12]),  # token 3 has none
}
OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "temperature": (WAYS, {"temperature": TEMPERATURE, "logit_scale": 0.5}),
    "softcap": (WAYS, {"softcap": 4.0, "temperature": TEMPERATURE}),
    "padding": (WAYS, {"vocab_size": V - 3}),
    "csr": (WAYS[:2], CSR),
    "cached scores": (WAYS[1:2], {"schedule": "cached", **CSR}),
    "max_counted": (WAYS[2:], {"max_counted": T - 1}),
    "skip_ignored": (WAYS[2:3], {"skip_ignored": True, "schedule": "cached"}),
    "other terms": (WAYS[2:3], {"label_smoothing": 0.1, "z_loss_weight": 0.01}),
}


@both
@pytest.mark.parametrize("every_id", [False, True], ids=["some", "every"])
@pytest.mark.parametrize(
    ("way", "name"), [(way, name) for name in OPTIONS for way in OPTIONS[name][0]]
)
def test_with_options(impl: str, way: str, name: str, every_id: bool) -> None:
    hidden, weight, bias = operands(every_id=every_id)
    given = {"hidden": hidden, "weight": weight, "bias": bias, **OPTIONS[name][1]}
    compare(found(way, impl, **given), truth(way, **given))


@both
@each_way
@each_dtype
@pytest.mark.parametrize("every_id", [False, True], ids=["some", "every"])
def test_in_each_dtype(impl: str, way: str, dtype: torch.dtype, every_id: bool) -> None:
    hidden, weight, bias = (x.to(dtype) for x in operands(every_id=every_id))
    given = {"hidden": hidden, "weight": weight, "bias": bias}
    compare(found(way, impl, **given), truth(way, **given))


WAYS_BACK: list[tuple[str, dict[str, Any]]] = [
    ("ids", {}),
    ("vocabulary", {"schedule": "recompute"}),
    ("vocabulary", {"schedule": "cached"}),
    ("frozen", {}),
    ("loss", {"schedule": "recompute"}),
    ("loss", {"schedule": "cached"}),
    ("loss", {"max_counted": T - 1}),
]


@both
@each_dtype
@pytest.mark.parametrize(("way", "options"), WAYS_BACK, ids=str)
def test_tokens_beside_one_do_not_change(
    impl: str, way: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Token 0 has no logit but -inf, by its temperature; the others keep their bits."""
    hidden, weight, bias = (x.to(dtype) for x in operands(every_id=False))
    bias = bias.clamp_min(-1) - 99

    def run(temperature: float) -> Outcome:
        of_tokens = torch.ones(T).index_fill(0, torch.tensor(0), temperature)
        if way == "loss":
            inputs = Inputs(hidden, weight, LABELS, bias, temperature=of_tokens)
            upstream = Upstream(torch.linspace(-1, 1, T), metric_upstream(T, "lse"))
            of_loss = {"reduction": "none", "ignore_index": -1, **options}
            return run_op(inputs, upstream, impl=impl, **of_loss)
        of_scores = {"temperature": of_tokens, "with_entropy": way != "frozen", **options}
        of_scores["over"] = "ids" if way == "ids" else "vocabulary"
        heads = {"logprob": torch.linspace(-1, 1, T * 3).view(T, 3), "lse": torch.ones(T)}
        trained = ("hidden",) if way == "frozen" else ("hidden", "weight", "bias")
        given = Scored(hidden, weight, bias, IDS, of_scores, heads, trained)
        return run_scores(given, impl)

    right, results = run(1.0), run(1e-38)
    of_tokens = [name for name in right if name not in ("dweight", "dbias")]
    for name in of_tokens:
        assert torch.equal(results[name][1:], right[name][1:]), name
        assert right[name].isfinite().all(), name
    assert results["lse"][0] == -torch.inf
    undefined = [name for name in of_tokens if name not in ("lse", "correct")]
    assert all(results[name][0].isnan().all() for name in undefined)
    if "dweight" in right:
        named = results["dweight"].isnan().all(1), results["dbias"].isnan()
        assert all(rows[IDS[0]].all() for rows in named)
        if way == "ids":  # only its own ids
            assert all(rows.sum() == 2 for rows in named)


HEADS: dict[str, tuple[str, ...]] = {
    "logprob": ("logprob",),
    "lse": ("lse",),
    "other": ("other",),
    "entropy": ("logprob", "entropy"),
}
NAMED = {"some": IDS, "whole": torch.arange(V).expand(T, V).where(IDS[:, :1] >= 0, -1)}
SCHEDULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "recompute": (("hidden", "weight", "bias"), tuple(HEADS)),
    "cached": (("hidden", "weight", "bias"), tuple(HEADS)),
    "in_forward": (("hidden",), tuple(name for name in HEADS if name != "entropy")),
}


@both
@pytest.mark.parametrize("ids", NAMED)
@pytest.mark.parametrize(
    ("schedule", "head"), [(name, head) for name in SCHEDULES for head in SCHEDULES[name][1]]
)
@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_of_scores_are_nan_in_each_row(
    impl: str, ids: str, schedule: str, head: str, ranks: str
) -> None:
    """Over the vocabulary: also in rows that no token names, on ranks that have no others."""
    hidden, weight, bias = operands(every_id=True)
    names = HEADS[head]
    upstream = {name: torch.ones(NAMED[ids].shape if name == "logprob" else T) for name in names}
    options = {"schedule": schedule, "with_entropy": "entropy" in names}
    trained = SCHEDULES[schedule][0]
    given = Scored(hidden, weight, bias, NAMED[ids], options, upstream, trained)
    right = run_reference(given.to(torch.float64))
    assert all(right[f"d{name}"].isnan().any() for name in trained)
    cuts = RANKS[ranks]
    for rank, results in enumerate(of_ranks(given, len(cuts) + 1, impl, cuts=cuts)):
        rows = slice((0, *cuts)[rank], (*cuts, V)[rank])
        for name in names:
            close(results[name].float(), right[name].double())
        close(results["dhidden"].float(), right["dhidden"].double())
        for name in ("dweight", "dbias")[: len(trained) - 1]:
            close(results[name].float(), right[name][rows].double())
