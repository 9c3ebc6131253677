"""What ``linear_logprob`` refuses, and how it says so."""

import itertools
import re
from functools import partial
from typing import Any

import pytest
import torch

from flce_dist import filtered, linear_logprob
from flce_dist.kernels.interface import kernels_of
from tests.problems import both, device_of
from tests.score_problem import T, V, problem

over_ids = partial(problem, over="ids")


@pytest.mark.parametrize(("options", "complaint"), [
    ({"ids": torch.full((T, 2), V)}, r"ids must be within \[0, 150\), or -1"),
    ({"ids": torch.full((T, 2), -2)}, r"ids must be within \[0, 150\), or -1"),
    ({"ids": torch.full((T, 2), V - 1), "vocab_size": V - 1}, r"within \[0, 149\)"),
    ({"ids": torch.ones(T + 1, 2, dtype=torch.long)}, r"ids must be \(24, K\)"),
    ({"ids": torch.ones(T, 2)}, "ids must have dtype torch.int64 or .*: pass ids.long"),
    ({"ids": torch.ones(T, dtype=torch.long)}, r"got \(24,\): pass ids\[\.\.\., None\] for one id"),
    ({"offsets": torch.arange(T)}, r"ids must be \[N\] and offsets \[T \+ 1\]"),
    ({"ids": torch.ones(T, dtype=torch.long), "offsets": torch.arange(T + 1) * 2},
     "offsets must rise from 0 to the 24 ids, got 0 to 48$"),
    ({"ids": torch.ones(T, dtype=torch.long), "offsets": torch.arange(T + 1) % T},
     r"got \[23, 0\] at token 23$"),
    ({"temperature": 0.0}, "temperature must be a float that is finite and above 0"),
    ({"temperature": -1.0}, "temperature must be a float that is finite and above 0"),
    ({"temperature": torch.ones(3)}, r"temperature must be \(24,\), as tokens"),
    ({"over": "labels"}, r"over must be one of \('vocabulary', 'ids'\), got 'labels'"),
    ({"with_entropy": 1}, "with_entropy must be a bool"),
    ({"schedule": "cached"}, "are of over='vocabulary', got 'cached' and None"),
    ({"tp_invariant": True, "impl": "eager"}, "tp_invariant=True needs impl='triton'"),
    ({"schedule": "in_forward"}, "are of over='vocabulary', got 'in_forward' and None"),
    *(({"over": over, "schedule": filtered.schedule(0.1)},
       f"'in_forward'.* got schedule={re.escape(repr(filtered.schedule(0.1)))}")
      for over in ("ids", "vocabulary")),
])  # fmt: skip
def test_refusals(options: dict[str, Any], complaint: str) -> None:
    given = over_ids()
    arguments = {"ids": given.ids, "over": "ids", **options}
    with pytest.raises((ValueError, NotImplementedError), match=complaint):
        linear_logprob(given.hidden, given.weight, **arguments)


def test_torch_compile_ends_a_graph_before_the_call_and_begins_one_after_it() -> None:
    given = problem(with_entropy=True, schedule="cached")
    assert given.bias is not None
    called: set[Any] = set()

    def note(graph: Any, inputs: Any) -> Any:
        called.update(getattr(x.target, "__name__", x.target) for x in graph.graph.nodes)
        return graph

    def step(hidden: torch.Tensor) -> torch.Tensor:
        out = linear_logprob(2 * hidden, given.weight, given.ids, **given.options)
        return out.logprob.sin() + out.lse[:, None]

    with pytest.raises(Exception, match=r"not part of a graph.* use fullgraph=False"):
        torch.compile(step, fullgraph=True, backend=note)(given.hidden)
    called.clear()
    results = []
    for call in (step, torch.compile(step, backend=note)):
        hidden = given.hidden.clone().requires_grad_()
        result = call(hidden)
        result.backward(torch.linspace(0, 1, result.numel()).view_as(result))
        results.append((result, hidden.grad))
    assert {"mul", "sin"} <= called and not {"matmul", "mm", "exp", "sort", "cumsum"} & called
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)


def test_a_second_derivative_is_refused() -> None:
    given = over_ids()
    hidden = given.hidden.requires_grad_()
    score = linear_logprob(hidden, given.weight, given.ids, over="ids").logprob.sum()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(score, hidden, create_graph=True)


@both
@pytest.mark.parametrize("K", [1, 8, 10])
def test_rows_and_keys_of_64_bits_sort_as_keys_of_32(impl: str, K: int) -> None:
    sort = kernels_of(impl).sorted_ids
    tensor = partial(torch.tensor, device=device_of(impl))
    ids = torch.randint(-1, V, (4000,)).to(device_of(impl))
    offsets = tensor([0, 0, 9, 22, 22, 4000])
    ids[1::4] = ids[::4]
    short, long = (sort(ids, offsets, size) for size in (V, 2**31 - 1))
    rows, flat = (sort(x, tensor(range(0, 4001, K)), V) for x in (ids.view(-1, K), ids))
    for one, other in zip((*short, *rows), (*long, *flat), strict=True):
        assert torch.equal(one, other)
    for begin, end in itertools.pairwise(offsets.tolist()):
        assert torch.equal(short.ids[begin:end], ids[begin:end].sort().values)
    far = tensor([[1, 2**60, 2**32], [2**62, 0, 1]])
    assert torch.equal(sort(far, tensor([0, 3, 6]), V).ids.msort(), far.flatten().msort())
