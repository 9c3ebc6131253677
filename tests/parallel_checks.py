"""Checks of the op on several ranks, each with a device of its own: what it computes.

A check runs on every rank at once and yields a message for each thing that is wrong there. It goes
on after a wrong number, and raises only what the op raises, so that ranks stay in step. All have a
meaning on a CPU over gloo, too.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from flce_dist import api, filtered
from flce_dist.launch.verify import cases
from flce_dist.launch.verify.checks import make_truth, run_case
from flce_dist.launch.verify.data import make_data
from flce_dist.parallel import transport
from flce_dist.testing import relative_rms
from tests.outcomes import Outcome
from tests.parallel_problem import Problem, complaint, rank_step, share_of
from tests.parallel_ranks import (
    Options,
    Ranks,
    against_fp64,
    differing,
    each_way,
    misses_of_share,
    other_work,
    problem,
    said,
    same_bits,
    ways,
)


def problems(device: torch.device) -> dict[str, Problem]:
    """Even, uneven and padded vocabularies; each reduction; few options and many."""
    V_all = problem(device).V_all
    T = problem(device).T
    many = {
        "reduction": "none", "label_smoothing": 0.1, "z_loss_weight": 1e-3, "logit_scale": 0.7,
        "token_weight": torch.linspace(0, 2, T, device=device),
    }  # fmt: skip
    capped = {"reduction": "sum", "softcap": 15.0}
    return {
        "even, mean": problem(device),
        "uneven, softcap, sum": problem(device, V_all=V_all - 61, options=capped),
        "padded, banned labels, none": problem(
            device, V_all=V_all - 64, rows=V_all, options={"reduction": "none"}, banned=0.01
        ),
        "uneven and padded, many options, none": problem(
            device, V_all=V_all - 66, rows=V_all - 61, options=many
        ),
    }


def gradients_against_fp64(ranks: Ranks) -> Iterator[str]:
    """Every problem in every way."""
    return against_fp64(ranks, problems(ranks.device), lambda one: ways(one, ranks.P))


def verified(ranks: Ranks, variants: Iterable[cases.Variant]) -> Iterator[str]:
    """What ``launch.verify`` checks of these."""
    P = ranks.P
    device = ranks.device
    for variant in variants:
        shape = cases.filtered_shape(P) if variant.filtered else cases.Shape(33, 123, 507)
        data = make_data(variant, shape, P, problem(device).dtype, device, seed=0)
        for case in cases.cases(variant, ("recompute", "cached"), P, None):
            truth = make_truth(data, variant, case.metric_gradients, case.filter_eps, P)
            found = run_case(case, data, truth, ranks.group, None)
            missed = (f"{name}: {check}" for name, check in found.items() if not check.met)
            yield from said(f"{variant.title}, {case.name}", missed)


def filtered_and_counted(ranks: Ranks) -> Iterator[str]:
    """Filtered gradients, and losses of the tokens that count."""
    counted = (variant for variant in cases.variants() if variant.counted)
    return verified(ranks, [*cases.filtered_variants(), *counted])


def scores(ranks: Ranks) -> Iterator[str]:
    """Log-probabilities at chosen ids, of the vocabulary and of these ids alone."""
    return verified(ranks, cases.score_variants())


def best_and_divergences(ranks: Ranks) -> Iterator[str]:
    """Best ids, ranks of labels and samples; divergences from a teacher."""
    return verified(ranks, [*cases.best_variants(), *cases.divergence_variants()])


def nothing_to_compute(ranks: Ranks) -> Iterator[str]:
    """No tokens; padding so heavy that all ranks but the first hold nothing else; none counted."""
    many: Options = {"label_smoothing": 0.1, "z_loss_weight": 1e-3}
    small = problem(ranks.device, T=24 * ranks.P, H=64, V_all=100, options=many)
    empty = {
        "no tokens": small.changed(T=0, V_all=1000),
        "no rows": small.changed(rows=100 * ranks.P),
        "no counted tokens": small.changed(ignored=1.1),
    }
    keeps_all = filtered.schedule(2.0**-20)  # of so few columns
    ways = {str(x): {"schedule": x} for x in ("recompute", "cached", "in_forward", keeps_all)}
    return against_fp64(ranks, empty, lambda one: ways)


def without_peer_copies(ranks: Ranks) -> Iterator[str]:
    """The same over collectives alone, as between hosts; and that it is not so by default."""
    if transport.memories_of(ranks.group, ranks.device) is None:
        yield "ranks on GPUs of one host do not copy from each other"
    with mock.patch.object(transport, "memories_of", lambda group, device: None):
        yield from gradients_against_fp64(ranks)


def equal_bits(ranks: Ranks) -> Iterator[str]:
    """One run like the next, whatever else the device does and wherever memory comes from."""
    one = problem(ranks.device, V_all=problem(ranks.device).V_all - 61)

    def again(options: Options) -> Iterator[tuple[str, Outcome]]:
        for repeat in range(3):
            with other_work(ranks, repeat):
                mine = rank_step(ranks.group, one, **options)
            yield f", repeat {repeat}", mine

    return same_bits(ranks, one, again)


def meshes(ranks: Ranks) -> Iterator[tuple[str, dist.ProcessGroup, dist.ProcessGroup | None]]:
    """Yield ``(name, tensor-parallel group, data-parallel group)``; of any number of ranks."""
    P = ranks.P
    device_type = ranks.device.type
    tp = 2 if P > 2 and P % 2 == 0 else 1
    for names, shape in ((("dp", "tp"), (P // tp, tp)), (("tp", "dp"), (tp, P // tp))):
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        yield f"mesh of {names}", mesh["tp"].get_group(), mesh["dp"].get_group()
    halves = [[r, P - 1 - r] for r in range(P // 2)] if P > 2 else [[r] for r in range(P)]
    groups = [dist.new_group(members) for members in halves]
    mine = next(i for i, members in enumerate(halves) if ranks.rank in members)
    yield f"new_group of {halves}", groups[mine], None
    yield "all ranks", ranks.group, None


def subgroups(ranks: Ranks) -> Iterator[str]:
    """Groups side by side, each with data of its own, while gradients of others are summed."""
    for name, tp_group, dp_group in meshes(ranks):
        replica = min(dist.get_process_group_ranks(tp_group))
        one = problem(ranks.device, seed=replica, T=problem(ranks.device).T // 2)
        chosen: dict[str, Options] = {x: {"schedule": x} for x in ("recompute", "in_forward")}
        for way, options in each_way(ranks, one, chosen):
            buffer = torch.full((1 << 22 if ranks.on_gpu else 1 << 10,), 1.0 + ranks.rank)
            buffer = buffer.to(ranks.device)
            work = None
            members = [ranks.rank]
            if dp_group is not None:
                work = dist.all_reduce(buffer, group=dp_group, async_op=True)
                members = dist.get_process_group_ranks(dp_group)
            mine = rank_step(tp_group, one, **options)
            if work is not None:
                work.wait()
            found = misses_of_share(mine, one, tp_group, options["sequence_parallel"])
            if not (buffer == sum(1.0 + r for r in members)).all():
                found.append("the other group's sum is wrong")
            yield from said(f"{name}: {way}", found)


def ranks_that_disagree(ranks: Ranks) -> Iterator[str]:
    """A group's first call names the rank that has other labels."""
    one = problem(ranks.device)
    odd = ranks.P - 1
    share = share_of(ranks.group, one, sequence_parallel=False)
    if ranks.rank == odd:
        share = share._replace(labels=share.labels.roll(1))
    with mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_RANKS": "1"}):
        raised = complaint(share.loss, dist.new_group(), one)
    if "hash of labels is" not in raised or f" on rank {odd}" not in raised:
        yield f"first call with other labels: {raised!r}"


def several_heads(ranks: Ranks) -> Iterator[str]:
    """All heads in flight before the first backward, which may be that of any: the same bits."""
    heads = [problem(ranks.device, seed=seed) for seed in range(3)]
    for way, options in each_way(ranks, heads[0]):
        sp = options["sequence_parallel"]
        plain = [rank_step(ranks.group, one, **options) for one in heads]
        for order in ((0, 1, 2), (2, 1, 0)):
            shares = [share_of(ranks.group, one, sequence_parallel=sp) for one in heads]
            leaves = [share.leaves() for share in shares]
            pairs = zip(shares, heads, strict=True)
            losses = [share.loss(ranks.group, one, **options) for share, one in pairs]
            for i in order:
                gradients = torch.autograd.grad(losses[i], leaves[i], heads[i].upstream)
                mine = Outcome.of(losses[i], *gradients)
                yield from differing(f"{way}, head {i} of {order}", mine, plain[i])


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
                mine = mine.changed(loss=plain.loss)
            yield from differing(f"{way}, use_reentrant={use_reentrant}", mine, plain)


def compiled(layer: Callable[..., Tensor], *arguments: Any) -> Tensor:
    torch._dynamo.reset()
    # The same graphs as inductor makes, in a tenth of the time.
    return torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments)


def under_compile(ranks: Ranks) -> Iterator[str]:
    """One graph without breaks, and the same bits."""
    one = problem(ranks.device)
    for schedule in ("recompute", "cached", "in_forward"):
        for sp in (False, True):
            options: Options = {"schedule": schedule, "sequence_parallel": sp}
            plain = rank_step(ranks.group, one, **options)
            mine = rank_step(ranks.group, one, call=layered(compiled), **options)
            yield from differing(f"{schedule}, sequence_parallel={sp}", mine, plain)
    torch._dynamo.reset()
