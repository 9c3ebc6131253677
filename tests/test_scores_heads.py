"""Scores of heads that are not one plain parameter used once."""

from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # before ranks are forked: it takes seconds
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flce_dist import TokenScores, linear_logprob
from flce_dist.parallel.vocab import vocab_range
from flce_dist.reference import reference_linear_logprob
from flce_dist.testing import relative_rms
from tests.on_ranks import on_ranks
from tests.score_problem import H, V, each_over, problem


def textbook(*args: Any, **options: Any) -> TokenScores:
    return TokenScores(*reference_linear_logprob(*args, **options))


@each_over
@pytest.mark.parametrize("use_reentrant", [True, False, None], ids=str)
def test_a_head_with_adapters_under_checkpointing(over: Any, use_reentrant: bool | None) -> None:
    given = problem(torch.float64, over=over)
    g = torch.Generator().manual_seed(2)
    adapters = [torch.randn(shape, generator=g).double() for shape in ((V, 4), (4, H))]

    def step(call: Any, checkpointed: bool) -> list[Any]:
        hidden, up, down = (x.clone().requires_grad_() for x in (given.hidden, *adapters))

        def head(hidden: Tensor, up: Tensor, down: Tensor) -> Tensor:
            weight = given.weight + 0.1 * up @ down
            out = call(hidden, weight, given.ids, over=over)
            return out.logprob.sum(-1) + out.entropy.sin() - out.lse

        if checkpointed:
            result = checkpoint(head, hidden, up, down, use_reentrant=use_reentrant)
        else:
            result = head(hidden, up, down)
        result.square().sum().backward()
        return [result.detach(), hidden.grad, up.grad, down.grad]

    score = partial(linear_logprob, with_entropy=True)
    found = step(score, use_reentrant is not None)
    for ours, right in zip(found, step(textbook, False), strict=True):
        assert relative_rms(ours, right) <= 1e-11
    for ours, right in zip(found, step(score, False), strict=True):
        assert torch.equal(ours, right)


@on_ranks(2)
def test_two_heads_with_uneven_shards_in_compiled_code(group):
    """Between its graphs, so collectives of both ranks come in one order."""
    torch._dynamo.reset()
    given = problem(torch.float64, rows=V + 1)
    rows = vocab_range(V + 1, group.rank(), 2)
    options = {"tp_group": group, "sequence_parallel": True, "vocab_size": V + 1, **given.options}
    score = partial(linear_logprob, vocab_range=rows, **options)

    def two_heads(call: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        one = call(hidden, weight, given.ids)
        other = call(hidden / 2, -weight, given.ids)
        return one.logprob - other.logprob.exp() + one.entropy[:, None] * other.lse[:, None]

    def step(run: Any, hidden: Tensor, weight: Tensor) -> list[Any]:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        result = run(*leaves)
        result.square().sum().backward()
        return [result.detach(), *(x.grad for x in leaves)]

    own = given.hidden.chunk(2)[group.rank()], given.weight[slice(*rows)]
    compiled = torch.compile(partial(two_heads, score), backend="eager")
    found = step(compiled, *own)
    truth = step(partial(two_heads, textbook), given.hidden, given.weight)
    truth[1:] = truth[1].chunk(2)[group.rank()], truth[2][slice(*rows)]
    for ours, right in zip(found, truth, strict=True):
        assert relative_rms(ours, right) <= 1e-11
