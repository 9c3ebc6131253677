"""max_counted and skip_ignored: other tokens than those that count are as if they were not there.

Here these hold NaN, as all memory that is allocated does, or weight 0 and a wrong label. What is
not computed of them is in test_skip_ignored.py and test_peak_memory.py; main_grad is in
test_main_grad.py, and graphs replayed with other masks are in test_gpu_graphs.py. T tokens,
V vocabulary rows, H hidden size.
"""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flce_dist import filtered, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.kernels.rows.counted_tokens import counted_tokens, counts
from flce_dist.testing import RankPool, run_ranks
from tests.outcomes import assert_same
from tests.parallel_problem import (
    Problem,
    complaint,
    joined,
    misses,
    on_threads,
    plan_sizes,
    rank_step,
)
from tests.problems import (
    DTYPES,
    IGNORE,
    SCHEDULES,
    Inputs,
    Upstream,
    both,
    compare,
    device_of,
    make_inputs,
    metric_upstream,
    pairwise,
    per_token_upstream,
    poisoned_memory,
    run_op,
)
from tests.test_sequence_dim import B, S, step_rank, whole

T, V, H = 300, 70, 32
t = torch.arange(T)
MASKS = {
    "all": t >= 0,
    "half": t % 2 == 0,
    "tenth": torch.rand(T, generator=torch.Generator().manual_seed(0)) < 0.1,
    "none": t < 0,
    "one per block": t % 128 == 33,
    "last": t == T - 1,
}
EVERY: dict[str, dict[str, Any]] = {
    **{str(name): {"schedule": name} for name in SCHEDULES},
    "some cached": {"schedule": "cached", "max_logits_bytes": 40_000},
    "chunks": {"schedule": "in_forward", "max_logits_bytes": 20_000},
    "filtered": {"schedule": filtered.schedule(0.01)},
}


def masked(name: str, dtype: torch.dtype = torch.float32) -> tuple[Inputs, Inputs]:
    """Inputs of which a mask counts, and what they mean: other tokens are ignored, and 0."""
    inputs = make_inputs(T, V, H, dtype, bias=True, token_weight=True, ignored=0.0)
    weights: Any = inputs.token_weight
    skipped = ~MASKS[name]
    of_weight_0 = skipped & (t % 3 == 0)
    hidden = inputs.hidden.masked_fill(skipped[:, None], 0.0)
    labels, weights = inputs.labels.masked_fill(skipped, IGNORE), weights.masked_fill(skipped, 0.0)
    meant = replace(inputs, hidden=hidden, labels=labels, token_weight=weights)
    given = replace(
        inputs,
        hidden=hidden.masked_fill(skipped[:, None], torch.nan),
        labels=labels.masked_fill(of_weight_0, 1 << 40),
        token_weight=weights.masked_fill(skipped & ~of_weight_0, torch.nan),
    )
    return given, meant


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {"reduction": "mean"},
    "sum": {"reduction": "sum", "label_smoothing": 0.1, "z_loss_weight": 0.01},
    "none": {"reduction": "none", "softcap": 5.0, "logit_scale": 0.7},
    "metrics": {"reduction": "none"},
}


def bound(mask: str, more: int = 0) -> int:
    return max(1, int(MASKS[mask].sum()) + more)


def upstream_of(loss: str) -> Upstream:
    metrics = metric_upstream(T, "lse", "logprob", "entropy") if loss == "metrics" else {}
    return Upstream(0.7 if loss in ("mean", "sum") else per_token_upstream(T), metrics)


EXACT = [name for name in EVERY if name != "filtered"]
COUNTED = pairwise(itertools.product(EXACT, DTYPES, MASKS, LOSSES, [0, 5, 1000]))
CASES = [
    *((*case, False, "eager") for case in COUNTED),
    *((*case, False, "triton") for case in COUNTED if case[1] == DTYPES[0] and case[4] < 1000),
    *pairwise(
        itertools.product(EVERY, DTYPES, MASKS, LOSSES, [None, 0, 40], [True], ["eager", "triton"])
    ),
]


def check(
    schedule: str, dtype: torch.dtype, mask: str, loss: str, more: int | None, skips: bool,
    impl: str,
) -> None:  # fmt: skip
    """Compare with the definition; ``max_counted`` exceeds the tokens that count by ``more``."""
    of_loss_only = EVERY[schedule]["schedule"] not in ("recompute", "cached")
    if of_loss_only and LOSSES[loss]["reduction"] == "none":
        loss = "sum"
    options = {**EVERY[schedule], **LOSSES[loss], "skip_ignored": skips}
    if more is not None:
        options["max_counted"] = bound(mask, more)
    (given, meant), upstream = masked(mask, dtype), upstream_of(loss)
    with plan_sizes(tile=8, min_window=8), poisoned_memory():
        found = run_op(given, upstream, impl=impl, **options)
    if schedule == "filtered":  # which approximates
        assert all(x.isfinite().all() for x in found.values())
    else:
        compare(found, meant, upstream, **options)


@pytest.mark.parametrize(("schedule", "dtype", "mask", "loss", "more", "skips", "impl"), CASES)
def test_results_are_those_of_the_definition(schedule, dtype, mask, loss, more, skips, impl):
    check(schedule, dtype, mask, loss, more, skips, impl)


def check_bits(name: str = "tenth", loss: str = "mean", **options: Any) -> None:
    """Compare with the call on the tokens that count alone, of which there are as many."""
    options |= LOSSES[loss]
    mask, (given, _), upstream = MASKS[name], masked(name), upstream_of(loss)

    def of_counted(x: Any) -> Any:
        return x[mask] if isinstance(x, Tensor) and x.dim() else x

    of_tokens = ("hidden", "labels", "token_weight")
    alone = replace(given, **{key: of_counted(getattr(given, key)) for key in of_tokens})
    of_metrics = {name: of_counted(g) for name, g in (upstream.metrics or {}).items()}
    expected = run_op(alone, Upstream(of_counted(upstream.loss), of_metrics), **options)
    for key, x in expected.items():
        if x.dim() and key not in ("dweight", "dbias"):
            expected[key] = x.new_zeros(T, *x.shape[1:])
            expected[key][mask] = x
    assert_same(run_op(given, upstream, max_counted=bound(name), **options), expected)


@both
@pytest.mark.parametrize("name", EVERY)
def test_bits_are_those_of_the_tokens_that_count_alone(impl, name):
    with plan_sizes(tile=8, min_window=8):
        check_bits(impl=impl, **EVERY[name])
        if name in ("recompute", "cached"):
            check_bits("half", "metrics", impl=impl, **EVERY[name])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_partition_of_many_tokens(share: float, weighted: bool) -> None:
    g, T, device = torch.Generator().manual_seed(1), 5000, device_of("triton")
    labels = torch.randint(3, (T,), generator=g).masked_fill(torch.rand(T, generator=g) > share, 3)
    weight = torch.rand(T, generator=g).round() if weighted else None
    mask = counts(labels, weight, 3)
    n = int(mask.sum())
    on_device = None if weight is None else weight.to(device)
    for N in {max(1, n), (n + T) // 2, T}:
        found = counted_tokens(labels.to(device), on_device, N, ignore_index=3)
        places, of_places, weight_of_places, count = (x if x is None else x.cpu() for x in found)
        assert count is not None and int(count) == n
        assert places is not None and of_places is not None
        assert torch.equal(places[:n], mask.nonzero().flatten()) and len(places.unique()) == N
        assert torch.equal(of_places, labels.where(mask, 3)[places])
        if weight is not None and weight_of_places is not None:
            assert torch.equal(weight_of_places, weight.where(mask, 0.0)[places])


@both
def test_too_many_tokens_and_wrong_labels_that_count_are_errors_on_every_rank(impl):
    given, _ = masked("half")
    tensors = {"hidden": given.hidden, "weight": given.weight, "token_weight": given.token_weight}
    call: Any = partial(complaint, linear_cross_entropy, **tensors, impl=impl)
    too_many = "max_counted must be at least the 150 tokens that count"
    assert call(labels=given.labels, max_counted=149) == f"{too_many}, got 149"
    wrong = given.labels.clone()
    wrong[4] = V
    assert call(labels=wrong, max_counted=150).endswith(f"got {V} at token 4")
    said = run_ranks(lambda group: call(labels=given.labels, max_counted=9, tp_group=group), 2)
    assert all(too_many in one for one in said)


LONG = Problem(T=48, ignored=0.7)
ONE_RANK = Problem(T=48, options={"token_weight": (torch.arange(48) // 24).float()})
"""No token of the first half counts."""
NONE = LONG.changed(ignored=1.1)
PER_TOKEN = LONG.changed(options={"reduction": "none", "label_smoothing": 0.1})
BATCHED = Problem(T=B * S, ignored=0.6, options={"reduction": "none"})


def n_of(problem: Problem) -> int:
    weight = problem.options.get("token_weight")
    return int(counts(problem.tensors[3], weight, IGNORE).sum())


@pytest.mark.parametrize("sp", [False, True], ids=["replicated", "sequence parallel"])
@pytest.mark.parametrize(("schedule", "problem", "more", "options"), [
    ("recompute", LONG, 0, {"reduce_in_fp32": True}),
    ("cached", ONE_RANK, 3, {}),
    ("cached", PER_TOKEN, 0, {}),
    ("in_forward", LONG, 1000, {}),
    ("in_forward", ONE_RANK, 1, {"max_logits_bytes": 9000}),
    ("cached", LONG.changed(dtype=torch.bfloat16), 0, {}),
    ("auto", NONE, 1, {}),
    ("cached", LONG, None, {"skip_ignored": True}),
    ("in_forward", ONE_RANK, None, {"skip_ignored": True}),
    ("recompute", NONE, None, {"skip_ignored": True}),
])  # fmt: skip
def test_on_ranks(schedule, problem, more, options, sp):
    """Whose shards of the vocabulary are uneven."""
    most = None if more is None else n_of(problem) + more
    options = {**options, "max_counted": most, "sequence_parallel": sp}
    with plan_sizes(tile=8, min_window=8):
        outcome = on_threads(4, problem, schedule=schedule, **options)
    assert misses(outcome, problem) == []


@pytest.mark.parametrize("sp", [False, True])
def test_kernels_on_ranks(ranks: RankPool, sp: bool) -> None:
    """The loss has the same bits on one rank, and of all tokens."""
    problem = LONG.changed(V_all=512)
    options: dict[str, Any] = {"impl": "triton", "tp_invariant": True}
    found = ranks.run(rank_step, problem, max_counted=20, sequence_parallel=sp, **options)
    two = joined(found, sequence_parallel=sp)
    assert misses(two, problem) == []
    for most in (None, 20):
        assert torch.equal(rank_step(None, problem, max_counted=most, **options).loss, two.loss)


@pytest.mark.parametrize("sp", [False, True])
def test_collectives_do_not_depend_on_the_mask(sp):
    """dhidden is summed of the 20 tokens alone, unless a rank gets its own tokens of it."""
    calls, *others = (
        on_threads(2, problem, schedule="recompute", max_counted=20, sequence_parallel=sp).calls
        for problem in (LONG, NONE, LONG.changed(seed=5))
    )
    assert all(other == calls for other in others)
    assert "allreduce MAX float32[20]" in calls
    assert ("allreduce SUM float32[640]" in calls) is not sp
    moved = [call for call in calls if "gather" in call or "scatter" in call]
    assert moved == (["allgather float32[768]"] * 2 + ["reduce_scatter SUM float32[1536]"]) * sp


@pytest.mark.parametrize("kind", ["", "compiled", "dtensors"])
def test_along_the_second_dimension(ranks: RankPool, kind: str) -> None:
    outcomes = ranks.run(step_rank, BATCHED, kind, max_counted=n_of(BATCHED) + 2)
    assert misses(whole(outcomes), BATCHED) == []


@pytest.mark.parametrize("skips", [False, True])
def test_one_graph_for_other_masks_and_bounds(skips):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=counter)
    cases: Any = ("tenth", 30), ("one per block", 30), ("half", 9), ("tenth", 1), ("all", 9)
    options: dict[str, Any] = {"reduction": "none"}
    if skips:
        cases, options = (("tenth", None), ("none", None), ("all", None)), {"skip_ignored": True}
    for mask, more in cases:
        given, _ = masked(mask)
        most = None if more is None else bound(mask, more)
        found = []
        for call in cast(Any, (compiled, linear_cross_entropy)):
            leaves = [x.clone().requires_grad_() for x in (given.hidden, given.weight)]
            loss = call(
                *leaves, given.labels, token_weight=given.token_weight, schedule="recompute",
                max_counted=most, **options,
            )  # fmt: skip
            found.append([loss.detach(), *torch.autograd.grad(loss.sum(), leaves)])
        assert all(itertools.starmap(torch.equal, zip(*found, strict=True)))
    assert counter.frame_count <= 2 - skips, "one for the first bound, one for every other"


@pytest.mark.parametrize("options", [{"max_counted": 3}, {"skip_ignored": True}], ids=str)
def test_metrics_vanish_where_the_weight_is_0(options: dict[str, Any]) -> None:
    """With an entropy bonus, too; an ordinary call computes them, whatever the weight."""
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight, labels = torch.eye(8), torch.arange(5)
    advantage = torch.tensor([1.0, 0.0, -2.0, 0.0, 0.5])

    def gradient(**options: Any) -> torch.Tensor:
        out = linear_cross_entropy_with_metrics(
            hidden, weight, labels, token_weight=advantage, reduction="sum", **options
        )
        (dhidden,) = torch.autograd.grad(out.loss - 0.1 * out.entropy.sum(), hidden)
        assert (out.entropy == 0).equal(~dhidden.any(1))
        return dhidden

    is_0 = advantage == 0
    assert gradient().any(1).all() and gradient(**options).any(1).equal(~is_0)
    assert torch.allclose(gradient(**options)[~is_0], gradient()[~is_0], rtol=1e-5, atol=1e-7)
