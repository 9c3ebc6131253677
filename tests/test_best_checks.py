"""``linear_top_k`` refuses arguments, gradients and graphs by name."""

from typing import Any

import pytest
import torch

from flce_dist import linear_sample, linear_top_k
from tests.best_problem import (
    T,
    V,
    best,
    problem,
    same_bits,
)


@pytest.mark.parametrize(("arguments", "complaint"), [
    ({"k": 0}, r"k must be None or an int within \[1, 2048\], got 0"),
    ({"k": 2049}, r"k must be None or an int within \[1, 2048\], got 2049"),
    ({"k": True}, "k must be None or an int"),
    ({"k": None}, "k or labels must be given"),
    ({"top_p": 0.0}, "top_p must be None or a float above 0 and at most 1"),
    ({"top_p": 1.5}, "top_p must be None or a float above 0 and at most 1"),
    ({"k": None, "top_p": 0.5, "labels": torch.zeros(T, dtype=torch.long)}, "k must be given with"),
    ({"max_counted": 3}, "labels must be given with max_counted"),
    ({"temperature": 0.0}, "temperature must be a float that is finite and above 0"),
    ({"labels": torch.zeros(T + 1, dtype=torch.long)}, r"labels must be \(12,\)"),
    ({"labels": torch.full((T,), V)}, r"labels must be within \[0, 330\)"),
    ({"tp_invariant": True, "impl": "eager"}, "tp_invariant=True needs impl='triton'"),
    ({"schedule": "cached"}, "unexpected keyword argument 'schedule'"),
])  # fmt: skip
def test_refusals(arguments: dict[str, Any], complaint: str) -> None:
    asked = problem(labelled=False)
    given = {"k": 3, **arguments}
    with pytest.raises((ValueError, NotImplementedError, TypeError), match=complaint):
        linear_top_k(asked.hidden, asked.weight, **given)


def test_gradients_are_refused_by_name() -> None:
    asked = problem(labelled=False)
    weight = asked.weight.requires_grad_()
    with pytest.raises(NotImplementedError, match="linear_top_k has no gradients, got weight"):
        linear_top_k(asked.hidden, weight, 2)
    with torch.no_grad():
        found = linear_top_k(asked.hidden, weight, 2)
    assert not any(x.requires_grad for x in found if x is not None)


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan])
def test_temperatures_of_tokens(bad: float) -> None:
    """Of both functions, with labels and without; of an ignored token any will do."""
    asked = problem(labelled=False)
    temperature = torch.ones(T)
    temperature[4] = bad
    operands = asked.hidden, asked.weight
    words = "temperature must be finite and above 0 for each token that counts, got .* at token 4"
    labels = torch.zeros(T, dtype=torch.long)
    for options in ({"k": 2}, {"k": 2, "labels": labels}, {"labels": labels}):
        with pytest.raises(ValueError, match=words):
            linear_top_k(*operands, **options, temperature=temperature)
    with pytest.raises(ValueError, match=words):
        linear_sample(*operands, 1, temperature=temperature)
    labels[4] = -100
    best = linear_top_k(*operands, 2, labels=labels, temperature=temperature)
    assert best.ids is not None
    assert (best.ids >= 0).all(1).tolist() == [t != 4 for t in range(T)]


def test_without_labels_no_token_is_ignored() -> None:
    """Whatever ignore_index is."""
    asked = problem(labelled=False)
    expected = linear_top_k(asked.hidden, asked.weight, 2)
    assert same_bits(linear_top_k(asked.hidden, asked.weight, 2, ignore_index=0), expected)


def test_csr_needs_ids() -> None:
    with pytest.raises(ValueError, match="csr needs ids"):
        best(problem(k=None)).csr()


def test_torch_compile_ends_a_graph_before_the_call_and_begins_one_after_it() -> None:
    asked = problem(labelled=False)

    def step(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = linear_top_k(2 * hidden, asked.weight, 3)
        drawn = linear_sample(2 * hidden, asked.weight, 5)
        assert best.ids is not None and best.logprob is not None
        return best.logprob.sin(), best.ids + drawn.ids[:, None]

    with pytest.raises(Exception, match=r"not part of a graph.* use fullgraph=False"):
        torch.compile(step, fullgraph=True, backend="eager")(asked.hidden)
    compiled = torch.compile(step, backend="eager")(asked.hidden)
    assert same_bits(compiled, step(asked.hidden))
