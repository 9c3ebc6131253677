"""Checks of the op on several ranks: what autograd and its tools do around it.

The same kind of checks as in parallel_checks.py: several calls in flight, checkpointing, compiling.
T tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from flce_dist import api
from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import relative_rms
from tests.parallel_problem import Outcome, Problem, misses, rank_step, share_of
from tests.parallel_ranks import Options, Ranks, differing, each_way, problem, same_bits

HEADS = 3


def heads_in_flight(
    ranks: Ranks, one: Problem, options: Options
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Call once for each head, with one weight; head i has the i-th part of the problem's tokens.

    So the sum of the losses is the loss of that problem, whose reduction is "sum". Returns the
    indices of the tokens whose hidden this rank holds, that hidden by head, ``[weight, bias]``, and
    the losses.
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


def one_by_one(ranks: Ranks, one: Problem, options: Options, order: list[int]) -> list[Outcome]:
    """A backward of each head's loss, in this order; outcomes by head."""
    _, hidden, shared, losses = heads_in_flight(ranks, one, options)
    found = {}
    for i in order:
        gradients = torch.autograd.grad(losses[i], [hidden[i], *shared], one.upstream)
        found[i] = Outcome(losses[i].detach(), *gradients)
    return [found[i] for i in range(HEADS)]


def into_main_grad(ranks: Ranks) -> Iterator[str]:
    """Two microbatches add dweight to main_grad in fp32 and in the operands' dtype."""
    one = problem(ranks.device)
    for way, options in each_way(ranks, one):
        plain = rank_step(ranks.group, one, **options)
        rms = plain.dweight.double().square().mean().sqrt().item()
        for dtype in dict.fromkeys((torch.float32, one.dtype)):
            main_grad = torch.full_like(plain.dweight, rms, dtype=dtype)
            before = main_grad.double()
            for microbatch in (1, 2):
                found = rank_step(ranks.group, one, call=adding_to(main_grad), **options)
                if found.dweight.any():
                    yield f"{way}: the gradient of weight is not zeros"
                yield from differing(way, found._replace(dweight=plain.dweight), plain)
                expected = before + microbatch * plain.dweight.double()
                error = relative_rms(main_grad, expected)
                if not error < 2 * torch.finfo(one.dtype).eps:
                    yield f"{way}: main_grad in {dtype}: error {error:.2g}"


def adding_to(main_grad: Tensor) -> Callable[..., Tensor]:
    """``api.linear_cross_entropy`` with fusion; the gradient in dweight's place is zeros."""

    def call(hidden: Tensor, weight: Any, labels: Tensor, **options: Any) -> Tensor:
        weight.main_grad, weight.grad_added_to_main_grad = main_grad, False
        return api.linear_cross_entropy(hidden, weight, labels, accumulate_dweight=True, **options)

    return call


def several_heads(ranks: Ranks) -> Iterator[str]:
    """All heads in flight before the first backward; in any order the same bits."""
    one = problem(ranks.device, options={"reduction": "sum"})
    rows = slice(*vocab_range(one.n_rows, ranks.rank, ranks.P))
    for way, options in each_way(ranks, one):
        tokens, hidden, shared, losses = heads_in_flight(ranks, one, options)
        loss, together = sum(losses[1:], losses[0]), []
        for retain_graph in (True, False):
            *dhidden, dweight, dbias = torch.autograd.grad(
                loss, [*hidden, *shared], one.upstream, retain_graph=retain_graph
            )
            together.append(Outcome(loss.detach(), torch.cat(dhidden), dweight, dbias))
        first, second = together
        for miss in misses(first, one, tokens, rows):
            yield f"{way}: {miss}"
        yield from differing(f"{way}, second backward", second, first)
        onwards = one_by_one(ranks, one, options, [0, 1, 2])
        backwards = one_by_one(ranks, one, options, [2, 1, 0])
        for i in range(HEADS):
            where = f"{way}, head {i}, backward in either order"
            yield from differing(where, backwards[i], onwards[i])
        if not torch.equal(torch.cat([head.dhidden for head in onwards]), first.dhidden):
            yield f"{way}: dhidden of heads alone not the same bits"


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
    # Ranks with unlike shards have unlike graphs, whose collectives must stay in step.
    one, options = problem(ranks.device, V_all=one.V_all - 61), {"sequence_parallel": True}
    plain = rank_step(ranks.group, one, call=layered(two_heads), **options)
    mine = rank_step(
        ranks.group, one, call=layered(lambda *given: compiled(two_heads, *given)), **options
    )
    yield from differing("two heads of uneven shards", mine, plain)
    torch._dynamo.reset()


def two_heads(layer: Callable[..., Tensor], hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer(hidden, weight, bias) + layer(hidden / 2, -weight, bias)


def with_dtensors(ranks: Ranks) -> Iterator[str]:
    """The same bits, also as gradients that arrive through DTensors of these operands."""
    one = problem(ranks.device, V_all=problem(ranks.device).V_all - 61)
    mesh = DeviceMesh.from_group(ranks.group, ranks.device.type)

    def as_dtensors(
        hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor, **options: Any
    ) -> Tensor:
        del options["vocab_range"]
        tokens = Shard(0) if options["sequence_parallel"] else Replicate()
        rows = [
            DTensor.from_local(
                x, mesh, [Shard(0)], shape=torch.Size((one.n_rows, *x.shape[1:])), stride=x.stride()
            )
            for x in (weight, bias)
        ]
        hidden = DTensor.from_local(hidden, mesh, [tokens])
        labels = DTensor.from_local(labels, mesh, [Replicate()])
        return api.linear_cross_entropy(hidden, rows[0], labels, bias=rows[1], **options)

    yield from same_bits(
        ranks, one, lambda options: [("", rank_step(ranks.group, one, call=as_dtensors, **options))]
    )
