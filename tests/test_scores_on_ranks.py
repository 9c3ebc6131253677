"""Scores over the vocabulary, and over each token's own ids, on several ranks."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from flce_dist.testing import relative_rms
from tests.problems import each_dtype
from tests.score_problem import (
    T,
    V,
    compare,
    each_over,
    of_ranks,
    on_ranks,
    problem,
    run_reference,
    run_scores,
)

over_ids = partial(problem, over="ids")


@each_over
@pytest.mark.parametrize("P", [2, 3, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_on_ranks(over: str, P: int, sequence_parallel: bool) -> None:
    given = problem(torch.float64, over=over, vocab_size=V - 3, with_entropy=over == "ids")
    given.ids.clamp_(max=V - 4)
    found = on_ranks(given, P, sequence_parallel=sequence_parallel)
    compare(found, given)
    assert not found["dweight"][V - 3 :].any()


@each_over
@pytest.mark.parametrize("K, first", [(3, 140), (40, 100)])
def test_shards_without_an_id_and_sets_larger_than_a_shard(over: Any, K: int, first: int) -> None:
    """Eight shards of 19 rows or 17: ids of the last one alone, and more than one has."""
    ids = torch.randint(first, V, (24, K), generator=torch.Generator().manual_seed(1))
    given = problem(torch.float64, ids=ids, over=over)
    compare(on_ranks(given, 8, sequence_parallel=True), given)


@pytest.mark.parametrize("options", [{"reduce_dhidden": False}, {"reduce_in_fp32": True}], ids=str)
def test_who_sums_dhidden(options: dict[str, Any]) -> None:
    given = over_ids(torch.float64)
    first, second = (x["dhidden"] for x in of_ranks(given, 2, **options))
    total = first if "reduce_in_fp32" in options else first + second
    assert relative_rms(total, run_reference(given)["dhidden"]) <= 1e-11


@each_dtype
@pytest.mark.parametrize(
    "options",
    [{"over": "ids", "reduce_in_fp32": True}, {"rows": 192, "vocab_size": V, "tp_invariant": True}],
    ids=["ids", "vocabulary"],
)
@pytest.mark.usefixtures("one_launch_at_a_time")
def test_interpreted_kernels_on_two_ranks(options: dict[str, Any], dtype: torch.dtype) -> None:
    given = problem(dtype, **options)
    found = on_ranks(given, 2, "triton", sequence_parallel=True)
    compare(found, given)
    one = run_scores(given, "triton")
    for name in given.upstream:
        assert torch.equal(found[name], one[name]), name  # for any number of ranks


@each_over
@pytest.mark.usefixtures("one_launch_at_a_time")
def test_batches_of_any_size_on_any_number_of_ranks_have_the_same_bits(over: Any) -> None:
    """As a decoder scores a few tokens on all ranks, and a trainer all of them; by any schedule."""
    given = problem(torch.bfloat16, rows=192, vocab_size=V, over=over)
    cached = given.changed(schedule="cached") if over == "vocabulary" else given
    whole = run_scores(cached, "triton", tp_invariant=True)
    start = 0
    for size in (1, 3, 7, T - 11):
        here = slice(start, start := start + size)
        upstream = {name: x[here] for name, x in given.upstream.items()}
        few = replace(given, hidden=given.hidden[here], ids=given.ids[here], upstream=upstream)
        if over == "vocabulary":
            few = few.changed(schedule="recompute")
        for run in (run_scores, partial(on_ranks, P=2)):
            found = run(few, impl="triton", tp_invariant=True)
            for name in given.upstream:
                assert torch.equal(found[name], whole[name][here]), (name, size)


def test_sequences_that_are_split_along_their_second_dimension() -> None:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (3, 4, 5), generator=g)
    temperature = torch.rand(3, 4, generator=g) + 0.5
    given = over_ids(torch.float64, ids=ids, temperature=temperature)
    truth = run_reference(given)
    found = of_ranks(given, 2, sequence_parallel=True, sequence_dim=1)
    for name in ("logprob", "lse", "entropy"):
        assert relative_rms(found[1][name], truth[name]) <= 1e-11, name
    for name, dim in (("dhidden", 1), ("dweight", 0), ("dbias", 0)):
        joined = torch.cat([of_rank[name] for of_rank in found], dim)
        assert relative_rms(joined, truth[name]) <= 1e-11, name
