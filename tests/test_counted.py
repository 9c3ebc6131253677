"""max_counted and skip_ignored: other tokens than those that count are as if they were not there.

Here these hold NaN, as all memory that is allocated does, or weight 0 and a wrong label. What is
not computed of them is in test_skip_ignored.py and test_peak_memory.py; main_grad is in
test_main_grad.py, and graphs replayed with other masks are in test_gpu_graphs.py. T tokens,
V vocabulary rows. Several ranks are in test_counted_on_ranks.py.
"""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.kernels.rows.counted_tokens import counted_tokens, counts
from flce_dist.testing import run_ranks
from tests.counted_problem import EVERY, LOSSES, MASKS, T, V, bound, check, masked, upstream_of
from tests.outcomes import assert_same
from tests.parallel_problem import complaint, plan_sizes
from tests.problems import DTYPES, Upstream, both, device_of, pairwise, run_op

EXACT = [name for name in EVERY if name != "filtered"]
COUNTED = pairwise(itertools.product(EXACT, DTYPES, MASKS, LOSSES, [0, 5, 1000]))
CASES = [
    *((*case, False, "eager") for case in COUNTED),
    *((*case, False, "triton") for case in COUNTED if case[1] == DTYPES[0] and case[4] < 1000),
    *pairwise(
        itertools.product(EVERY, DTYPES, MASKS, LOSSES, [None, 0, 40], [True], ["eager", "triton"])
    ),
]


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
