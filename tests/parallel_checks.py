"""Checks of the op on several ranks, each with a device of its own: what it computes.

A check runs on every rank at once and yields a message for each thing that is wrong there. It goes
on after a wrong number, and raises only what the op raises, so that ranks stay in step. All have a
meaning on a CPU over gloo, too. T tokens, H hidden size, V_all vocabulary, P ranks.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from flce_dist import check_ranks, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.op.plan import Plan, plan
from flce_dist.options import Impl
from flce_dist.parallel import transport
from flce_dist.parallel.vocab import vocab_range
from tests.parallel_problem import Outcome, Problem, beyond_budget, rank_step, share_of

Options = dict[str, Any]
GRADIENTS = ("dhidden", "dweight", "dbias")


@dataclass(frozen=True)
class Ranks:
    """Where checks run: the group of all ranks, and this rank's device."""

    group: dist.ProcessGroup
    device: torch.device
    impl: Impl | None = None

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def P(self) -> int:
        return self.group.size()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def problem(device: torch.device, **changes: Any) -> Problem:
    """An even problem of the device's size; ``changes`` may give it fewer rows or options."""
    if device.type == "cuda":
        # Enough tokens, even half of them, to be gathered in two pieces.
        plain = Problem(T=4608, H=2048, V_all=32064, dtype=torch.bfloat16, device=device)
    else:
        plain = Problem(T=48, H=32, V_all=360)  # for plans of small_pieces
    return plain.changed(**changes)


def problems(device: torch.device) -> dict[str, Problem]:
    """Even, uneven and padded vocabularies; each reduction; few options and many."""
    V_all = problem(device).V_all
    T = problem(device).T
    many = {
        "reduction": "none",
        "label_smoothing": 0.1,
        "z_loss_weight": 1e-3,
        "logit_scale": 0.7,
        "token_weight": torch.linspace(0, 2, T, device=device),
    }
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


def ways(one: Problem, P: int) -> dict[str, Options]:
    """Every schedule; part of the columns cached; gradients in forward in token chunks."""
    token_bytes = -(-one.n_rows // P) * one.dtype.itemsize
    most = {"max_logits_bytes": one.T * token_bytes * 3 // 4}
    found: dict[str, Options] = {
        "recompute": {"schedule": "recompute"},
        "cached": {"schedule": "cached"},
        "part cached": {"schedule": "cached", **most},
        "auto": {"schedule": "auto"},
        "auto, budget": {"schedule": "auto", **most},
    }
    if one.options.get("reduction") != "none":
        found["in_forward"] = {"schedule": "in_forward"}
        found["in_forward, chunks"] = {
            "schedule": "in_forward",
            "max_logits_bytes": one.T // 3 * token_bytes,
        }
    return found


def plan_of(one: Problem, P: int, options: Options) -> Plan:
    """What the op does with ``one`` in this way."""
    itemsize = one.dtype.itemsize
    return plan(
        T=one.T, V=-(-one.V_all // P), itemsize=itemsize, schedule=options["schedule"],
        max_logits_bytes=options.get("max_logits_bytes"),
        dweight_row_bytes=(one.H * itemsize, one.H * 4),
    )  # fmt: skip


def different_ways(one: Problem, P: int) -> dict[str, Options]:
    """Those of ``ways`` that differ in what they do, for checks that compare bits."""
    kept = ("recompute", "cached", "part cached", "in_forward, chunks")
    return {name: ways(one, P)[name] for name in kept}


def step(
    ranks: Ranks, one: Problem, *, group: dist.ProcessGroup | None = None, **options: Any
) -> Outcome:
    """Forward and backward of this rank's share."""
    call = options.pop("call", linear_cross_entropy)
    return rank_step(group or ranks.group, one, call=call, impl=ranks.impl, **options)


def outcome(loss: Tensor, gradients: Sequence[Tensor]) -> Outcome:
    dhidden, dweight, dbias = gradients
    return Outcome(loss.detach(), dhidden, dweight, dbias)


@dataclass(frozen=True)
class Truth:
    """Outcomes on the whole inputs, in fp64 and of eager PyTorch; every rank makes its own."""

    oracle: Outcome
    eager: Outcome

    @classmethod
    def of(cls, one: Problem) -> "Truth":
        return cls(one.textbook(torch.float64), one.textbook(one.dtype))

    def misses(self, mine: Outcome, tokens: Any, rows: slice) -> list[str]:
        """Compare a rank's share: the gradients of these tokens and vocabulary rows."""
        oracle, eager = (
            Outcome(whole.loss, whole.dhidden[tokens], whole.dweight[rows], whole.dbias[rows])
            for whole in (self.oracle, self.eager)
        )
        return beyond_budget(mine, oracle, eager)


def misses_of_share(
    truth: Truth, mine: Outcome, one: Problem, group: dist.ProcessGroup, sequence_parallel: bool
) -> list[str]:
    rank, P = group.rank(), group.size()
    tokens = slice(rank * one.T // P, (rank + 1) * one.T // P) if sequence_parallel else slice(None)
    return truth.misses(mine, tokens, slice(*vocab_range(one.n_rows, rank, P)))


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Names of results that are not equal to the bit; NaN is not equal."""
    names = ("loss", *GRADIENTS)
    return [name for name in names if not torch.equal(getattr(one, name), getattr(other, name))]


def said(where: str, sequence_parallel: bool, messages: list[str]) -> Iterator[str]:
    for message in messages:
        yield f"{where}{', SP' if sequence_parallel else ''}: {message}"


def differing(where: str, sequence_parallel: bool, one: Outcome, other: Outcome) -> Iterator[str]:
    names = differences(one, other)
    messages = [f"{', '.join(names)} not the same bits"] if names else []
    yield from said(where, sequence_parallel, messages)


def same_on_all_ranks(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether every rank of ``group`` holds the bits of ``x``; collective."""
    x = x.reshape(-1)
    everyone = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(everyone, x, group=group)
    return all(torch.equal(theirs, x) for theirs in everyone)


def gradients_against_fp64(ranks: Ranks) -> Iterator[str]:
    """Loss and gradients of every problem in every way, and the same loss everywhere."""
    for name, one in problems(ranks.device).items():
        truth = Truth.of(one)
        for way, options in ways(one, ranks.P).items():
            for sp in (False, True):
                mine = step(ranks, one, sequence_parallel=sp, **options)
                found = misses_of_share(truth, mine, one, ranks.group, sp)
                if not same_on_all_ranks(mine.loss, ranks.group):
                    found.append("loss differs between ranks")
                if not sp and not same_on_all_ranks(mine.dhidden, ranks.group):
                    found.append("dhidden differs between ranks")
                yield from said(f"{name}: {way}", sp, found)


def without_peer_copies(ranks: Ranks) -> Iterator[str]:
    """The same over collectives alone, as between hosts; and that it is not so by default."""
    if transport.memories_of(ranks.group, ranks.device) is None:
        yield "ranks on GPUs of one host do not copy from each other"
    with mock.patch.object(transport, "memories_of", lambda group, device: None):
        yield from gradients_against_fp64(ranks)


@contextmanager
def other_work(ranks: Ranks, seed: int) -> Iterator[None]:
    """Move later allocations about, and keep another stream of the GPU busy meanwhile."""
    sizes = torch.randint(1 << 10, 1 << 20, (8,), generator=torch.Generator().manual_seed(seed))
    held = [torch.full((n,), torch.nan, device=ranks.device) for n in sizes.tolist()]
    del held[seed % 2 :: 2]
    if not ranks.on_gpu:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x = torch.randn(2048, 2048, device=ranks.device, dtype=torch.bfloat16)
        for _ in range(50 + 50 * ((ranks.rank + seed) % ranks.P)):
            x = (x @ x).clamp(-1, 1)
    yield
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def equal_bits(ranks: Ranks) -> Iterator[str]:
    """One run like the next, whatever else the device does and wherever memory comes from."""
    one = problem(ranks.device, V_all=problem(ranks.device).V_all - 61)
    for way, options in different_ways(one, ranks.P).items():
        for sp in (False, True):
            first = step(ranks, one, sequence_parallel=sp, **options)
            for repeat in range(3):
                with other_work(ranks, repeat):
                    again = step(ranks, one, sequence_parallel=sp, **options)
                yield from differing(f"{way}, repeat {repeat}", sp, again, first)
                if not same_on_all_ranks(again.loss, ranks.group):
                    yield f"{way}, repeat {repeat}: loss differs between ranks"


def equal_bits_for_any_ranks(ranks: Ranks) -> Iterator[str]:
    """tp_invariant: loss and metrics of all ranks, and of two, are those of one, to the bit."""
    one = problem(ranks.device, V_all=problem(ranks.device).V_all // 256 * 256)

    def statistics(group: dist.ProcessGroup | None, **options: Any) -> list[Tensor]:
        sp = options.get("sequence_parallel", False)
        hidden, weight, bias, labels, rows = share_of(group, one, sequence_parallel=sp)
        out = linear_cross_entropy_with_metrics(
            hidden.requires_grad_(), weight.requires_grad_(), labels, bias=bias, vocab_range=rows,
            vocab_size=one.V_all, tp_group=group, tp_invariant=True, impl="triton", **options,
        )  # fmt: skip
        out.loss.backward()
        counted = labels != -100
        return [out.loss.detach(), *(x.detach()[counted] for x in out[1:4])]

    names = ("loss", "lse", "logprob", "entropy")
    alone = statistics(None)
    pairs = [list(range(r, min(r + 2, ranks.P))) for r in range(0, ranks.P, 2)]
    of_pairs = [dist.new_group(members) for members in pairs]
    for group in (ranks.group, of_pairs[ranks.rank // 2]):
        for way, options in different_ways(one, group.size()).items():
            for sp in (False, True):
                found = statistics(group, sequence_parallel=sp, **options)
                pairs_of = zip(names, found, alone, strict=True)
                others = [name for name, x, expected in pairs_of if not torch.equal(x, expected)]
                text = f"{', '.join(others)} of {group.size()} ranks not the bits of one"
                yield from said(way, sp, [text] if others else [])


def meshes(ranks: Ranks) -> Iterator[tuple[str, dist.ProcessGroup, dist.ProcessGroup | None]]:
    """Yield ``(name, tensor-parallel group, data-parallel group)``; of any number of ranks."""
    P, device_type = ranks.P, ranks.device.type
    tp = 2 if P > 2 and P % 2 == 0 else 1
    layouts = {
        f"mesh of dp {P // tp} x tp {tp}": (("dp", "tp"), (P // tp, tp)),
        f"mesh of tp {tp} x dp {P // tp}": (("tp", "dp"), (tp, P // tp)),
        f"mesh of dp 1 x cp {P // tp} x tp {tp}": (("dp", "cp", "tp"), (1, P // tp, tp)),
    }
    for name, (names, shape) in layouts.items():
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        beside = "cp" if "cp" in names else "dp"
        yield name, mesh["tp"].get_group(), mesh[beside].get_group()
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
        truth = Truth.of(one)
        for schedule in ("recompute", "in_forward"):
            for sp in (False, True):
                buffer = torch.full((1 << 22 if ranks.on_gpu else 1 << 10,), 1.0 + ranks.rank)
                buffer = buffer.to(ranks.device)
                work = None
                if dp_group is not None:
                    work = dist.all_reduce(buffer, group=dp_group, async_op=True)
                mine = step(ranks, one, group=tp_group, sequence_parallel=sp, schedule=schedule)
                if work is not None:
                    work.wait()
                found = misses_of_share(truth, mine, one, tp_group, sp)
                members = [ranks.rank]
                if dp_group is not None:
                    members = dist.get_process_group_ranks(dp_group)
                if not (buffer == sum(1.0 + r for r in members)).all():
                    found.append("the other group's sum is wrong")
                yield from said(f"{name}: {schedule}", sp, found)


def ranks_that_disagree(ranks: Ranks) -> Iterator[str]:
    """``check_ranks`` names the argument and the rank, and so does a group's first call.

    Nobody waits for anybody.
    """
    one = problem(ranks.device)
    odd = ranks.P - 1
    share = share_of(ranks.group, one, sequence_parallel=False)
    share = share._replace(labels=share.labels.clamp(max=one.V_all - 2))  # also in fewer columns
    other_labels = share.labels.roll(1)
    calls: dict[str, tuple[Options, str]] = {
        "all alike": ({}, ""),
        "label_smoothing": ({"label_smoothing": 0.1}, f"0.1 on rank {odd}"),
        "bias": ({"bias": None}, f"None on rank {odd}"),
        "labels": ({"labels": other_labels}, f" on rank {odd}"),
        "vocab_size": ({"vocab_size": one.V_all - 1}, f"{one.V_all - 1} on rank {odd}"),
    }
    for name, (changes, verdict) in calls.items():
        arguments: Options = {**share._asdict(), "vocab_size": one.V_all}
        if ranks.rank == odd:
            arguments |= changes
        try:
            check_ranks(**arguments, tp_group=ranks.group, impl=ranks.impl)
            complaint = None
        except ValueError as error:
            complaint = str(error)
        expected = complaint is None
        if changes:
            expected = complaint is not None and name in complaint and verdict in complaint
        if not expected:
            yield f"{name}: check_ranks said {complaint!r}"

    labels = other_labels if ranks.rank == odd else share.labels
    keywords: Options = {"vocab_size": one.V_all, "vocab_range": share.vocab_range}
    keywords |= {"tp_group": dist.new_group(), "impl": ranks.impl}
    raised = ""
    with mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_LABELS": "1"}):
        try:
            linear_cross_entropy(share.hidden, share.weight, labels, **keywords)
        except ValueError as error:
            raised = str(error)
    if f"rank {odd} got others" not in raised:
        yield f"first call with other labels: {raised!r}"
