"""max_counted: only tokens that count are computed; the others are as if they were not there.

Here these hold NaN, or weight 0 and a wrong label. T tokens of which n count, V rows, H hidden size.
"""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flce_dist import LinearCrossEntropy, check_ranks, filtered, linear_cross_entropy
from flce_dist.kernels import counted_tokens, eager, eager_rows
from flce_dist.parallel import counted
from flce_dist.testing import RankPool, run_ranks
from tests.parallel_problem import Problem, complaint, joined, misses, on_threads, rank_step
from tests.problems import (
    DTYPES,
    IGNORE,
    SCHEDULES,
    Inputs,
    Outcome,
    Patch,
    Upstream,
    assert_same,
    both,
    compare,
    device_of,
    each_schedule,
    make_inputs,
    metric_upstream,
    pairwise,
    per_token_upstream,
    plan_sizes,
    run_op,
)
from tests.test_gpu_graphs import Replayed, step_on
from tests.test_gpu_oracle import each_device
from tests.test_peak_memory import operands, step_bytes
from tests.test_sequence_dim import B, S, step_rank, whole

T, V, H = 300, 150, 32
t = torch.arange(T)
MASKS = {
    "all": t >= 0,
    "half": t % 2 == 0,
    "tenth": torch.rand(T, generator=torch.Generator().manual_seed(0)) < 0.1,
    "none": t < 0,
    "the second half": t >= T // 2,
    "one per block": t % 128 == 33,
}
EVERY = {
    **{str(name): {"schedule": name} for name in SCHEDULES},
    "some cached": {"schedule": "cached", "max_logits_bytes": 40_000},
    "chunks": {"schedule": "in_forward", "max_logits_bytes": 20_000},
    "filtered": {"schedule": filtered.schedule(0.01)},
}


def masked(mask: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Inputs, Inputs]:
    """Inputs of which ``mask`` counts, and what they mean: zeros that are ignored elsewhere."""
    given = make_inputs(len(mask), V, H, dtype, bias=True, token_weight=True, ignored=0.0)
    assert given.token_weight is not None
    skipped, of_weight_0 = ~mask, ~mask & (torch.arange(len(mask)) % 3 == 0)
    hidden, weight = given.hidden, given.token_weight
    meant = replace(
        given,
        hidden=hidden.masked_fill(skipped[:, None], 0.0),
        labels=given.labels.masked_fill(skipped, IGNORE),
        token_weight=weight.masked_fill(skipped, 0.0),
    )
    return replace(
        given,
        hidden=hidden.masked_fill(skipped[:, None], torch.nan),
        labels=given.labels.masked_fill(skipped, IGNORE).masked_fill(of_weight_0, 1 << 40),
        token_weight=weight.masked_fill(skipped, torch.nan).masked_fill(of_weight_0, 0.0),
    ), meant


def bound(mask: Tensor, more: int = 0) -> int:
    return max(1, int(mask.sum())) + more


def upstream_of(reduction: str, n: int = T, *, metrics: bool = False) -> Upstream:
    names = ("lse", "logprob", "entropy") if metrics else ()
    loss = per_token_upstream(n) if reduction == "none" else 0.7
    return Upstream(loss, metric_upstream(n, *names) if names else None)


EXTRAS: dict[str, dict[str, Any]] = {
    "mean": {"reduction": "mean"},
    "sum": {"reduction": "sum", "label_smoothing": 0.1, "z_loss_weight": 0.01},
    "none": {"reduction": "none", "softcap": 5.0, "logit_scale": 0.7},
    "metrics": {"reduction": "none"},
}
CASES = pairwise(itertools.product(["recompute", "cached", "in_forward", "some cached", "chunks"],
                                   DTYPES, MASKS, EXTRAS, [0, 5, 1000]))  # fmt: skip
"""Schedule, dtype, which tokens count, loss, and by how many N exceeds their number."""


@pytest.mark.parametrize(
    ("impl", "schedule", "dtype", "mask", "extra", "more"),
    [
        *(("eager", *case) for case in CASES),
        *(("triton", *case) for case in CASES[::4] if case[2] in ("tenth", "one per block")),
    ],
)
def test_results_are_those_of_the_definition(impl, schedule, dtype, mask, extra, more):
    options = {**EVERY[schedule], **EXTRAS[extra]}
    if options["reduction"] == "none" and options["schedule"] == "in_forward":
        options["reduction"] = "sum"
    metrics = extra == "metrics" and options["schedule"] != "in_forward"
    given, meant = masked(MASKS[mask], dtype)
    upstream = upstream_of(options["reduction"], metrics=metrics)
    with plan_sizes(tile=8, min_window=8):
        options["max_counted"] = bound(MASKS[mask], more)
        found = run_op(given, upstream, impl=impl, with_metrics=metrics, **options)
    compare(found, meant, upstream, **options)


def of_counted_alone(mask: Tensor, inputs: Inputs, upstream: Upstream, **options: Any) -> Outcome:
    """The same of a call on the tokens that count, put into zeros."""

    def pick(x: Any) -> Any:
        return x[mask] if isinstance(x, Tensor) and x.dim() else x

    names = ("hidden", "labels", "token_weight")
    alone = replace(inputs, **{name: pick(getattr(inputs, name)) for name in names})
    metrics = {name: pick(g) for name, g in (upstream.metrics or {}).items()}
    found = run_op(alone, Upstream(pick(upstream.loss), metrics or None), **options)
    for name in found.keys() - {"dweight", "dbias"}:
        if found[name].dim():
            out = found[name].new_zeros(len(mask), *found[name].shape[1:])
            out[mask] = found[name]
            found[name] = out
    return found


def check_bits(impl: str = "eager", mask: str = "tenth", **options: Any) -> None:
    reduction = options.setdefault("reduction", "mean")
    given, _ = masked(MASKS[mask])
    upstream = upstream_of(reduction, metrics=options.get("with_metrics", False))
    alone = of_counted_alone(MASKS[mask], given, upstream, impl=impl, **options)
    found = run_op(given, upstream, impl=impl, max_counted=bound(MASKS[mask]), **options)
    assert_same(found, alone)


@both
@pytest.mark.parametrize("name", EVERY)
def test_bits_are_those_of_the_tokens_that_count_alone(impl, name):
    with plan_sizes(tile=8, min_window=8):
        check_bits(impl, **EVERY[name])
        if name in ("recompute", "cached"):
            check_bits(impl, "one per block", reduction="none", with_metrics=True, **EVERY[name])


def shifted(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Places of the next tokens."""
    places, *others = original(*args, **kwargs)
    return (places + 1) % len(args[0]), *others


def wrong_row(original: Any, x: Tensor, places: Any, *args: Any) -> Any:
    return original(x, places if places is None else places.roll(1), *args)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [(eager, "counted_tokens", shifted), (counted, "put_back", wrong_row)],
)
def test_bits_show_a_wrong_place(mutate: Patch, owner: Any, name: str, wrong: Any) -> None:
    check_bits()
    mutate(owner, name, wrong)
    with pytest.raises(AssertionError, match="dhidden"):
        check_bits()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_partition_of_many_tokens(share: float, weighted: bool) -> None:
    """Of several programs, the last one not full."""
    g, T = torch.Generator().manual_seed(1), 5000
    labels = torch.randint(7, (T,), generator=g).masked_fill(torch.rand(T, generator=g) > share, 3)
    weight = torch.rand(T, generator=g).round() if weighted else None
    mask = labels != 3 if weight is None else (labels != 3) & (weight != 0)
    device = device_of("triton")
    for N in (max(1, int(mask.sum())), 4200, T):
        if N < mask.sum():
            continue
        on_device = labels.to(device), None if weight is None else weight.to(device)
        found = counted_tokens.counted_tokens(*on_device, N, ignore_index=3)
        expected = eager_rows.counted_tokens(labels, weight, N, ignore_index=3)
        places, own, _ = (None if x is None else x.cpu() for x in found)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours is theirs is None or torch.equal(ours.cpu(), theirs)  # type: ignore[union-attr]
        assert places is not None and own is not None
        n = int(mask.sum())
        assert torch.equal(places[:n], mask.nonzero().flatten())
        assert len(places.unique()) == N and (own[n:] == 3).all()
        assert torch.equal(own[:n], labels[places[:n]])


# --- too many


@both
def test_more_tokens_than_the_bound_are_an_error_and_labels_that_count_are_read(impl):
    given, _ = masked(MASKS["half"])
    call = partial(
        linear_cross_entropy, given.hidden, given.weight, token_weight=given.token_weight, impl=impl
    )
    said = complaint(call, given.labels, max_counted=149)
    assert said.startswith("max_counted must be at least the number of tokens that count, 150 of")
    wrong = given.labels.clone()
    wrong[4] = V
    assert complaint(call, wrong, max_counted=150).endswith("got 150 at token 4")
    assert complaint(call, given.labels, max_counted=150) == ""
    ranks = run_ranks(lambda group: complaint(call, given.labels, tp_group=group, max_counted=9), 2)
    assert all(said.startswith("max_counted must be at least") for said in ranks)
    ranks = run_ranks(
        lambda group: complaint(check_ranks, given.hidden, given.weight, given.labels,
                                token_weight=given.token_weight, tp_group=group, max_counted=9), 2
    )  # fmt: skip
    assert all("max_counted must be at least" in said for said in ranks)


# --- ranks

LONG = Problem(T=48, ignored=0.7)
"""Uneven shards; 14 tokens count."""
ONE_RANK = Problem(T=48, options={"token_weight": (torch.arange(48) // 24).float()})
"""No token of the first half counts."""
PER_TOKEN = LONG.changed(options={"reduction": "none", "label_smoothing": 0.1})


def n_of(problem: Problem) -> int:
    weight = problem.options.get("token_weight")
    return int(eager_rows.counts(problem.tensors[3], weight, IGNORE).sum())


@pytest.mark.parametrize("sp", [False, True], ids=["replicated", "sequence parallel"])
@pytest.mark.parametrize(
    ("schedule", "problem", "more", "options"),
    [
        ("recompute", LONG, 0, {}),
        ("cached", ONE_RANK, 3, {}),
        ("cached", PER_TOKEN, 0, {}),
        ("in_forward", LONG, 1000, {}),
        ("in_forward", ONE_RANK, 1, {"max_logits_bytes": 9000}),
        ("recompute", LONG, 0, {"reduce_in_fp32": True}),
        ("cached", LONG.changed(dtype=torch.bfloat16), 0, {}),
        ("auto", LONG.changed(ignored=1.1), 1, {}),
        ("recompute", LONG, 2, {"impl": "triton"}),
    ],
)
def test_on_ranks(schedule, problem, more, options, sp):
    options = {**options, "max_counted": n_of(problem) + more, "sequence_parallel": sp}
    with plan_sizes(split_from=16, tile=8, min_window=8):
        outcome = on_threads(4, problem, schedule=schedule, **options)
    assert misses(outcome, problem) == []


def test_ranks_do_not_sum_dhidden_where_the_caller_does():
    options = {"max_counted": n_of(LONG) + 1, "reduce_dhidden": False}
    ranks = run_ranks(lambda group: rank_step(group, LONG, **options), 2)
    shares = sum(rank.dhidden for rank in ranks)
    ranks = [rank._replace(dhidden=shares) for rank in ranks]  # type: ignore[arg-type]
    assert misses(joined(ranks, sequence_parallel=False), LONG) == []


@pytest.mark.parametrize("sp", [False, True])
def test_collectives_do_not_depend_on_the_mask(sp):
    """Statistics are of N tokens. dhidden is too, unless a rank gets its own tokens of it."""
    calls = [
        on_threads(2, problem, schedule="recompute", max_counted=20, sequence_parallel=sp).calls
        for problem in (LONG, LONG.changed(ignored=1.1), LONG.changed(ignored=0.8, seed=5))
    ]
    assert calls[0] == calls[1] == calls[2]
    assert "allreduce MAX float32[20]" in calls[0]
    gathers = [call for call in calls[0] if "gather" in call or "scatter" in call]
    expected = ["allgather float32[768]"] * 2 + ["reduce_scatter SUM float32[1536]"]
    assert gathers == (expected if sp else [])
    assert ("allreduce SUM float32[640]" in calls[0]) is not sp


def test_ranks_show_a_row_in_the_wrong_place(mutate: Patch) -> None:
    options = {"schedule": "recompute", "max_counted": n_of(LONG), "sequence_parallel": True}

    def wrong(original: Any, self: Any, tokens: Tensor, places: Tensor, new_sum: Any) -> None:
        original(self, tokens, places.roll(1), new_sum)

    mutate(counted.PutBackAndScattered, "__init__", wrong)
    (missed,) = misses(on_threads(2, LONG, **options), LONG)
    assert missed.startswith("dhidden")


BATCHED = Problem(T=B * S, ignored=0.6, options={"reduction": "none"})


@pytest.mark.parametrize("kind", ["", "compiled", "dtensors"])
def test_along_the_second_dimension(ranks: RankPool, kind: str) -> None:
    outcomes = ranks.run(step_rank, BATCHED, kind, max_counted=n_of(BATCHED) + 2)
    assert misses(whole(outcomes), BATCHED) == []


def test_the_loss_has_the_same_bits_on_one_rank_and_two():
    options = {"impl": "triton", "tp_invariant": True, "max_counted": 20}
    problem = LONG.changed(V_all=512)
    one = rank_step(None, problem, **options)
    two = on_threads(2, problem, sequence_parallel=True, **options)
    alone = rank_step(None, problem, impl="triton", tp_invariant=True)
    assert torch.equal(one.loss, two.loss) and torch.equal(one.loss, alone.loss)


# --- with what else a call may be


@each_schedule
def test_main_grad_and_autocast(schedule):
    given, meant = masked(MASKS["tenth"])
    found = []
    for inputs, options in ((given, {"max_counted": bound(MASKS["tenth"])}), (meant, {})):
        hidden, weight = (x.clone().requires_grad_() for x in (inputs.hidden, inputs.weight))
        weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(
                hidden, weight, inputs.labels, token_weight=inputs.token_weight,
                accumulate_dweight=True, schedule=schedule, **options,
            )  # fmt: skip
        loss.backward()
        found.append((loss, hidden.grad, weight.main_grad))  # type: ignore[attr-defined]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-3)


def test_one_graph_for_other_masks_and_bounds():
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=counter)
    for mask, more in (("tenth", 30), ("one per block", 30), ("half", 9), ("tenth", 1), ("all", 9)):
        given, _ = masked(MASKS[mask])
        found = []
        for call in (compiled, linear_cross_entropy):
            leaves = [x.clone().requires_grad_() for x in (given.hidden, given.weight)]
            loss = call(
                *leaves, given.labels, token_weight=given.token_weight, schedule="recompute",
                max_counted=bound(MASKS[mask], more), reduction="none",
            )  # fmt: skip
            found.append([loss.detach(), *torch.autograd.grad(loss.sum(), leaves)])
        assert all(map(torch.equal, *found))
    assert counter.frame_count <= 3, "first bound, any below T, any above"


@each_device
@pytest.mark.parametrize("name", EVERY)
def test_replay_with_other_masks(name, device):
    """A graph captured with one mask, replayed with others."""
    impl = "triton" if device == "cuda" else "eager"
    cases = [masked(MASKS[mask])[0].to(torch.device(device)) for mask in ("tenth", "none", "half")]
    options = {**EVERY[name], "max_counted": 160, "impl": impl}
    expected = [step_on(replace(case, hidden=case.hidden.clone()), **options) for case in cases]
    static = replace(cases[0], **{k: x.clone() for k, x in vars(cases[0]).items()})
    replayed = Replayed(lambda: step_on(static, **options), device)
    for i in (1, 2, 0):
        with torch.no_grad():
            for field, buffer in vars(static).items():
                buffer.copy_(getattr(cases[i], field))
        replayed.replay()
        assert all(map(torch.equal, replayed.results, expected[i]))


def test_the_module_takes_it():
    head = LinearCrossEntropy(H, V, max_counted=3)
    labels = torch.tensor([-100, 4, -100, 5, 6, -100])
    hidden = torch.randn(6, H)
    alone = linear_cross_entropy(hidden[labels >= 0], head.weight, labels[labels >= 0])
    assert torch.equal(head(hidden, labels), alone)
    assert "max_counted=3" in repr(head)


@each_schedule
def test_memory_is_that_of_the_tokens_that_count(schedule):
    """Beside it hidden's gradient, and a copy of rows of hidden."""
    T, n, V = 2048, 64, 8192
    hidden, weight, labels = operands(T=T, V=V)
    labels = labels.masked_fill(torch.arange(T) % (T // n) != 0, IGNORE)
    alone = operands(T=n, V=V)
    options = {"schedule": schedule}
    peak, saved = step_bytes(alone, **options)
    ours, ours_saved = step_bytes((hidden, weight, labels), max_counted=n, **options)
    of_T = hidden.nbytes + 5 * T * 8  # places, and temporaries of the partition
    assert ours <= peak + of_T + n * hidden.shape[1] * 4 and ours_saved <= saved + of_T
    assert n * V * 4 < ours < T * V * 4 / 4
