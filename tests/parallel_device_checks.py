"""Checks as in parallel_checks.py of how the op runs: streams, graphs, waiting hosts, memory.

On a CPU, which has neither streams nor graphs, steps just run again, which proves the comparisons.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flce_dist.kernels.logits import eager as eager_logits
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.memory import release_shared_memory
from tests.devices import Replayed, host_must_not_wait
from tests.outcomes import Outcome
from tests.parallel_problem import Problem, Share, rank_step, share_of
from tests.parallel_ranks import Options, Ranks, differing, each_way, problem, said, same_bits

MIB = 1 << 20
REPEATS = 2


def late(ranks: Ranks, turn: int) -> None:
    """Hold up this rank's stream, another rank's longer each turn: collectives stay in flight.

    Meanwhile the hosts go on, and hand out again whatever memory they believe to be free.
    """
    if ranks.on_gpu:
        torch.cuda._sleep(10_000_000 * (1 + 3 * ((ranks.rank + turn) % ranks.P)))  # from 6 ms on


def poison(ranks: Ranks, one: Problem, like: list[Tensor]) -> None:
    """Take free memory of every size that the op uses, write NaN to it, and let it go again."""
    T, V = one.T, like[1].shape[0]
    shapes = [*(x.shape for x in like), torch.Size((T, one.H)), torch.Size((T,))]
    kinds = [(shape, dtype) for shape in shapes for dtype in (one.dtype, torch.float32)]
    kinds.append((torch.Size((T, -(-V // 16) * 16)), one.dtype))
    for shape, dtype in kinds:
        spoiled = [torch.full(shape, torch.nan, dtype=dtype, device=ranks.device) for _ in range(4)]
        del spoiled


def step_on_streams(
    ranks: Ranks, one: Problem, turn: int, forward_on: Any, backward_on: Any, **options: Any
) -> Outcome:
    """Forward and backward on these streams (None: the current one), in memory that held NaN."""
    share = share_of(ranks.group, one, sequence_parallel=options["sequence_parallel"])
    leaves = share.leaves()
    streams = [s for s in (forward_on, backward_on) if s is not None]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(forward_on):
        poison(ranks, one, leaves)
        late(ranks, turn)
        # Nobody holds them but the op.
        mine = Share(leaves[0].clone(), leaves[1].clone(), leaves[2].clone(), *share[3:])
        loss = mine.loss(ranks.group, one, **options)
        del mine
        poison(ranks, one, leaves)
    poison(ranks, one, leaves)
    if backward_on is not None:
        backward_on.wait_stream(forward_on)
    with torch.cuda.stream(backward_on):
        late(ranks, turn + 1)
        gradients = torch.autograd.grad(loss, leaves, one.upstream)
        poison(ranks, one, leaves)
    with torch.cuda.stream(forward_on):
        poison(ranks, one, leaves)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    copies = Outcome.of(loss.clone(), *(x.clone() for x in gradients))
    del loss, gradients
    poison(ranks, one, leaves)
    if ranks.on_gpu:
        torch.cuda.synchronize()
    return copies


def other_streams(ranks: Ranks) -> Iterator[str]:
    """The same bits on a side stream, and with backward on another one than forward."""
    one = problem(ranks.device)
    first, second = (torch.cuda.Stream() if ranks.on_gpu else None for _ in range(2))

    def steps(options: Options) -> Iterator[tuple[str, Outcome]]:
        for backward_on, name in ((first, "a side stream"), (second, "two streams")):
            for turn in range(REPEATS):
                mine = step_on_streams(ranks, one, turn, first, backward_on, **options)
                yield f", {name}, turn {turn}", mine

    return same_bits(ranks, one, steps)


def same_bits_within(
    ranks: Ranks, context: Callable[[], AbstractContextManager[Any]]
) -> Iterator[str]:
    """A step in a context has the bits of a plain one, which was before it."""
    one = problem(ranks.device)

    def steps(options: Options) -> Iterator[tuple[str, Outcome]]:
        with context():
            mine = rank_step(ranks.group, one, **options)
        yield "", mine

    return same_bits(ranks, one, steps)


def another_device(ranks: Ranks) -> Iterator[str]:
    """The same bits where another GPU than the tensors' is the current one."""
    other = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
    return same_bits_within(ranks, lambda: torch.cuda.device(other))


def captured(ranks: Ranks) -> Iterator[str]:
    """Forward and backward with their collectives in one graph, replayed on other data."""
    batches = [problem(ranks.device, seed=seed) for seed in range(3)]
    for way, options in each_way(ranks, batches[0]):
        yield from said(way, replays(ranks, batches, **options))


def replays(ranks: Ranks, batches: list[Problem], **options: Any) -> Iterator[str]:
    """Capture with the first batch, then replay with each, the first one last."""
    one = batches[0]

    def forward_and_backward(share: Share) -> list[Tensor]:
        leaves = share.leaves()
        loss = share.loss(ranks.group, one, **options)
        return [loss.detach(), *torch.autograd.grad(loss, leaves, one.upstream)]

    def batch(i: int) -> Share:
        sequence_parallel = options["sequence_parallel"]
        return share_of(ranks.group, batches[i], sequence_parallel=sequence_parallel)

    def load(i: int) -> None:
        with torch.no_grad():
            for buffer, new in zip(static[:4], batch(i)[:4], strict=True):
                buffer.copy_(new)

    static = batch(0)
    expected = [Outcome.of(*forward_and_backward(batch(i))) for i in range(3)]
    # NCCL's watchdog asks after events from a thread of its own while this one captures.
    replayed = Replayed(
        lambda: forward_and_backward(static), ranks.device.type, capture_error_mode="thread_local"
    )
    for i in (1, 2, 0):
        load(i)
        if torch.equal(replayed.results[0], expected[i].loss):
            yield f"batch {i}: its loss was there before the replay"
        replayed.replay()
        yield from differing(f"batch {i}", Outcome.of(*replayed.results), expected[i])
    for times in (2, 3) if options["sequence_parallel"] else ():
        rank_step(ranks.group, one.changed(T=times * one.T), **options)  # what ranks share grows
    load(1)
    replayed.replay()
    yield from differing("after larger calls", Outcome.of(*replayed.results), expected[1])
    if ranks.on_gpu:
        torch.cuda.synchronize()  # a graph must not go while it runs


def no_waiting_host(ranks: Ranks) -> Iterator[str]:
    """Nothing in forward and backward makes the host wait for the GPU, once kernels are there."""
    return same_bits_within(ranks, host_must_not_wait)


def memory(ranks: Ranks) -> Iterator[str]:
    """recompute under sequence parallelism holds one window of logits, whatever the vocabulary."""
    if ranks.on_gpu:
        T = 4096
        H = 1024
        V = 32768
        window = 64 * MIB
        workspace = 64 * MIB
        small_temporaries: AbstractContextManager[Any] = nullcontext()
    else:
        T = 512
        H = 32
        V = 8192
        window = MIB
        workspace = 8 * MIB
        small_temporaries = mock.patch.object(eager_logits, "SCRATCH_BYTES", MIB)
    one = problem(ranks.device, T=T, H=H, V_all=V * ranks.P)
    share = share_of(ranks.group, one, sequence_parallel=True)
    leaves = share.leaves()
    options: Options = {"schedule": "recompute", "max_logits_bytes": window}
    for _ in range(2):  # at first, workspaces that stay
        release_shared_memory()
        with small_temporaries, peak_memory(ranks.device) as peak:
            loss = share.loss(ranks.group, one, sequence_parallel=True, **options)
            gradients = torch.autograd.grad(loss, leaves, one.upstream)
            del loss, gradients
    beyond = peak.bytes + peak.shared_bytes - sum(leaf.nbytes for leaf in leaves)
    limit = T * H * one.dtype.itemsize + 4 * T * H + window + workspace
    if not 0 < beyond <= limit:
        yield f"{beyond / MIB:.1f} MiB beyond gradients, outside (0, {limit / MIB:.1f}]"
