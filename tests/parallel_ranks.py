"""What the checks on several ranks share: problems, ways to compute them, and comparisons."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.parallel.vocab import vocab_range
from flce_dist.schedules.choose import choose_schedule
from flce_dist.schedules.fit import Plan
from tests.outcomes import Outcome
from tests.parallel_problem import GRADIENTS, Problem, misses, rank_step

Options = dict[str, Any]


@dataclass(frozen=True)
class Ranks:
    """Where checks run: the group of all ranks, None for one rank, and this rank's device."""

    group: Any
    device: torch.device

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def P(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def problem(device: torch.device, **changes: Any) -> Problem:
    """An even problem of the device's size; ``changes`` may give it fewer rows or options."""
    if device.type == "cuda":
        plain = Problem(T=4608, H=2048, V_all=32064, dtype=torch.bfloat16, device=device)
    else:
        plain = Problem(T=48, H=32, V_all=360)  # for plans of small_chunks
    return plain.changed(**changes)


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
        few = {"max_logits_bytes": one.T // 3 * token_bytes}
        found["in_forward, chunks"] = {"schedule": "in_forward", **few}
    return found


def plan_of(one: Problem, P: int, options: Options) -> Plan:
    """What the op does with ``one`` in this way."""
    itemsize = one.dtype.itemsize
    return choose_schedule(
        T=one.T, V=-(-one.V_all // P), itemsize=itemsize, schedule=options["schedule"],
        max_logits_bytes=options.get("max_logits_bytes"),
        dweight_row_bytes=(one.H * itemsize, one.H * 4),
    )  # fmt: skip


def different_ways(one: Problem, P: int) -> dict[str, Options]:
    """Those of ``ways`` that differ in what they do, for checks that compare bits.

    On a CPU fewer: part of the columns has all that the others have.
    """
    kept = ["part cached", "in_forward, chunks"]
    if str(one.device) != "cpu":
        kept += ["recompute", "cached"]
    return {name: ways(one, P)[name] for name in kept}


def each_way(
    ranks: Ranks, one: Problem, chosen: Mapping[str, Options] | None = None
) -> Iterator[tuple[str, Options]]:
    """Yield names and options of calls, by default of different ways, without and with SP."""
    for way, options in (different_ways(one, ranks.P) if chosen is None else chosen).items():
        yield way, {"sequence_parallel": False, **options}
        yield f"{way}, SP", {"sequence_parallel": True, **options}


def said(where: str, messages: Iterable[str]) -> Iterator[str]:
    for message in messages:
        yield f"{where}: {message}"


def misses_of_share(
    mine: Outcome, one: Problem, group: dist.ProcessGroup, sequence_parallel: bool
) -> list[str]:
    """``misses`` of what this rank of ``group`` holds."""
    rank = group.rank()
    P = group.size()
    tokens = slice(rank * one.T // P, (rank + 1) * one.T // P) if sequence_parallel else slice(None)
    return misses(mine, one, tokens, slice(*vocab_range(one.n_rows, rank, P)))


def differing(where: str, one: Outcome, other: Outcome) -> Iterator[str]:
    """Name the results that are not equal to the bit; NaN is not equal."""
    names = ("loss", *GRADIENTS)
    found = [name for name in names if not torch.equal(getattr(one, name), getattr(other, name))]
    if found:
        yield f"{where}: {', '.join(found)} not the same bits"


def same_on_all_ranks(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether every rank of ``group`` holds the bits of ``x``; collective."""
    x = x.reshape(-1)
    everyone = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(everyone, x, group=group)
    return all(torch.equal(theirs, x) for theirs in everyone)


def against_fp64(
    ranks: Ranks, problems: Mapping[str, Problem], ways_of: Callable[[Problem], dict[str, Options]]
) -> Iterator[str]:
    """Loss and gradients of every problem in every way, and the same loss everywhere."""
    for name, one in problems.items():
        for way, options in each_way(ranks, one, ways_of(one)):
            sp = options["sequence_parallel"]
            mine = rank_step(ranks.group, one, **options)
            found = misses_of_share(mine, one, ranks.group, sp)
            if not same_on_all_ranks(mine.loss, ranks.group):
                found.append("loss differs between ranks")
            if not sp and one.T and not same_on_all_ranks(mine.dhidden, ranks.group):
                found.append("dhidden differs between ranks")
            yield from said(f"{name}: {way}", found)


def same_bits(
    ranks: Ranks, one: Problem, steps: Callable[[Options], Iterable[tuple[str, Outcome]]]
) -> Iterator[str]:
    """Whatever ``steps`` yields, by name, has the bits of a plain step with the same options."""
    for way, options in each_way(ranks, one):
        expected = rank_step(ranks.group, one, **options)
        for name, mine in steps(options):
            yield from differing(f"{way}{name}", mine, expected)
            if not same_on_all_ranks(mine.loss, ranks.group):
                yield f"{way}{name}: loss differs between ranks"


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
