"""Checks as in parallel_checks.py: several calls in flight, checkpointing, compiling."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flce_dist import api
from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import relative_rms
from tests.parallel_problem import Outcome, Problem, misses, rank_step, share_of
from tests.parallel_ranks import Options, Ranks, differing, each_way, problem, said

HEADS = 3


def heads_in_flight(
    ranks: Ranks, one: Problem, options: Options
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Call once for each head, with one weight; head i has the i-th part of the problem's tokens.

    Returns the indices of the tokens whose hidden this rank holds, that hidden by head, ``[weight,
    bias]``, and the losses, whose sum is that of the problem.
    """
    share = share_of(ranks.group, one, sequence_parallel=False)
    heads = mine = torch.arange(one.T, device=ranks.device).tensor_split(HEADS)
    if options["sequence_parallel"]:
        mine = tuple(tokens.tensor_split(ranks.P)[ranks.rank] for tokens in heads)
    hidden = [share.hidden[tokens].requires_grad_() for tokens in mine]
    shared = [share.weight.requires_grad_(), share.bias.requires_grad_()]
    losses = [
        share._replace(hidden=x, labels=share.labels[tokens]).loss(ranks.group, one, **options)
        for x, tokens in zip(hidden, heads, strict=True)
    ]
    return torch.cat(mine), hidden, shared, losses


def several_heads(ranks: Ranks) -> Iterator[str]:
    """All heads in flight before the first backward, which may be that of any head."""
    one = problem(ranks.device, options={"reduction": "sum"})
    rows = slice(*vocab_range(one.n_rows, ranks.rank, ranks.P))
    for way, options in each_way(ranks, one):
        for order in (range(HEADS), reversed(range(HEADS))):
            tokens, hidden, shared, losses = heads_in_flight(ranks, one, options)
            for i in order:
                losses[i].backward(one.upstream)
            loss = torch.stack(losses).sum().detach()
            of_leaves: list[Any] = [x.grad for x in (*hidden, *shared)]
            *dhidden, dweight, dbias = of_leaves
            mine = Outcome(loss, torch.cat(dhidden), dweight, dbias)
            found = misses(mine, one, tokens, rows)
            yield from said(f"{way}, backward of head {i} last", found)


def layered(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The op within a layer, which is called by ``run(layer, hidden, weight, bias)``."""

    def call(hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor, **options: Any):
        def layer(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return api.linear_cross_entropy(hidden, weight, labels, bias=bias, **options)

        return run(layer, hidden, weight, bias)

    return call


def activation_checkpointing(ranks: Ranks) -> Iterator[str]:
    """The same bits, with forward run once more in backward."""
    one = problem(ranks.device)
    for way, options in each_way(ranks, one):
        plain = rank_step(ranks.group, one, **options)
        for use_reentrant in (False, True):
            how: Options = {"use_reentrant": use_reentrant, "preserve_rng_state": False}
            call = layered(partial(checkpoint, **how))
            mine = rank_step(ranks.group, one, call=call, **options)
            if use_reentrant and options["schedule"] == "in_forward":
                # Its first forward makes no gradients, and sums tokens in another order.
                error = relative_rms(mine.loss, plain.loss)
                if not error <= 1e-6:
                    yield f"{way}: loss: error {error:.3g} exceeds 1e-06"
                mine = mine._replace(loss=plain.loss)
            yield from differing(f"{way}, use_reentrant={use_reentrant}", mine, plain)


def compiled(layer: Callable[..., Tensor], *arguments: Any) -> Tensor:
    torch._dynamo.reset()
    # The same graphs as inductor makes, in a tenth of the time.
    return torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments)


def under_compile(ranks: Ranks) -> Iterator[str]:
    """One graph without breaks, and the same bits."""
    one = problem(ranks.device)
    for schedule in ("recompute", "cached", "in_forward"):
        # On a CPU tests/test_compiled.py has them without sequence parallelism.
        for sp in (False, True) if ranks.on_gpu else (True,):
            options: Options = {"schedule": schedule, "sequence_parallel": sp}
            plain = rank_step(ranks.group, one, **options)
            mine = rank_step(ranks.group, one, call=layered(compiled), **options)
            yield from differing(f"{schedule}, sequence_parallel={sp}", mine, plain)
    torch._dynamo.reset()
