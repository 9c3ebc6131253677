"""One run at one shape: load it, call it once for errors and memory, then time it in turns.

The life of a run is the same on every rank, and ranks agree on failures where they can (before
anything is timed), so that a peer that is missing or out of memory costs its own row only.
"""

import gc
import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.launch.bench.config import BenchConfig, RunSpec
from flce_dist.launch.bench.floors import FLOORS
from flce_dist.launch.bench.loss_functions import filtered_shares, leaves_of, load_run
from flce_dist.launch.bench.peers import PEERS, LossFunction
from flce_dist.launch.bench.problem import Errors, Problem, Truth, errors_of
from flce_dist.launch.bench.profiles import Profile, take_profile
from flce_dist.launch.call_time import call_ms
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.launch.process_group import failures, gathered
from flce_dist.memory import release_shared_memory

MOST_CALLS = 1000


@dataclass(eq=False)
class Measured:
    """What is known of one run: its errors, its memory, its samples; or why it failed."""

    run: RunSpec
    problem: Problem
    config: BenchConfig
    errors: Errors = field(default_factory=Errors)  # the worst of all ranks
    loss_eps: float = 0.0  # of its dtype
    peak_bytes: int | None = None  # what one call needed above its inputs, where that was most
    gradient_bytes: int = 0  # of it what the call returns
    filtered: dict[str, Any] = field(default_factory=dict)  # kept_share and rank_one_mass
    call_ms: float = 0.0  # of the first call timed
    calls: int = 1  # of a sample
    samples_ms: list[float] = field(default_factory=list)  # time of one call on the slowest rank
    failure: str | None = None  # message of all ranks, or of the first that failed
    _loss_of: LossFunction | None = None
    _replay: Callable[[], Any] | None = None

    def prepare(self, truth: Truth | None) -> None:
        """Load, warm up, compare with ``truth``, measure memory, choose the calls of a sample."""
        if self.run.impl not in FLOORS:
            self._guarded(self._load)
        self._guarded(partial(self._first_calls, truth))
        self.call_ms = self._slowest_ms(1) or 0.0
        self.calls = self._calls_within(self.config.sample_ms)
        if self.failure is not None or self.peak_bytes is None:  # of a floor
            return
        mine = self.errors, self.peak_bytes, self.gradient_bytes
        errors, *memory = zip(*gathered(mine, self.problem.tp_group), strict=True)
        self.errors = Errors(*map(_worst, zip(*map(astuple, errors), strict=True)))
        # The rank with the largest peak, and its own gradients.
        self.peak_bytes, self.gradient_bytes = max(zip(*memory, strict=True))

    def sample(self) -> None:
        """Take one sample."""
        if self.problem.tp_group is not None:
            dist.barrier(self.problem.tp_group)
        call_ms = self._slowest_ms(self.calls)
        if call_ms is not None:
            self.samples_ms.append(call_ms)

    def profile(self, trace: Path | None) -> Profile | None:
        """Profile the calls of a sample; None if the run failed. ``trace`` is a file for rank 0."""
        file = trace if self.problem.rank == 0 else None
        device = self.problem.hidden.device
        return self._guarded(lambda: take_profile(self._settled(), self.calls, device, file))

    def release(self) -> None:
        """Forget the loss function, with what it may have compiled or cached."""
        self._loss_of = self._replay = None

    def _calls_within(self, ms: float) -> int:
        return min(MOST_CALLS, max(1, math.ceil(ms / max(self.call_ms, 1e-3))))

    def _load(self) -> None:
        self._loss_of = load_run(self.run, self.problem)
        if self.run.filter_eps is not None:
            self.filtered = filtered_shares(self.run, self.problem)

    def _call(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Compute the loss once and, by mode, both gradients anew."""
        assert self._loss_of is not None
        if self.run.mode == "forward":
            with torch.no_grad():
                return self._loss_of(hidden, weight, self.problem.labels)
        hidden.grad = weight.grad = None
        loss = self._loss_of(hidden, weight, self.problem.labels)
        loss.backward()
        return loss.detach()

    def _call_on(self, hidden: Tensor, weight: Tensor) -> Callable[[], Any]:
        if self.run.impl in FLOORS:
            return FLOORS[self.run.impl].make(hidden, weight)
        return partial(self._call, hidden, weight)

    def _first_calls(self, truth: Truth | None) -> None:
        hidden, weight = leaves_of(self.run, self.problem)
        call = self._call_on(hidden, weight)
        for _ in range(self.config.warmup):
            loss = call()
        if self.run.impl in FLOORS:
            return
        self.loss_eps = torch.finfo(loss.dtype).eps
        gradients = [x.grad for x in (hidden, weight) if x.grad is not None]
        if self.run.mode == "forward_backward" and len(gradients) < 2 - self.run.frozen:
            raise RuntimeError("backward must fill the gradients of hidden and weight")
        if truth is not None:
            self.errors = errors_of(self.run, loss, gradients, self.problem, truth)
        self.gradient_bytes = sum(x.numel() * x.element_size() for x in gradients)
        hidden.grad = weight.grad = None
        del loss, gradients
        peer = PEERS.get(self.run.impl)
        if peer is not None and peer.drop_buffers is not None:
            peer.drop_buffers()
        release_shared_memory()  # of other runs
        with peak_memory(hidden.device) as peak:
            call()
        self.peak_bytes = peak.bytes + peak.shared_bytes

    def _slowest_ms(self, calls: int) -> float | None:
        """Time ``calls`` calls; return the slowest rank's time of one, None if the run failed."""
        call_ms = self._guarded(partial(self._time, calls))
        return None if call_ms is None else max(gathered(call_ms, self.problem.tp_group))

    def _time(self, calls: int) -> float:
        """Return the milliseconds of one of ``calls`` calls back to back."""
        return call_ms(self._settled(), calls, self.problem.hidden.device)

    def _settled(self) -> Callable[[], Any]:
        """Return what is to be timed, after untimed calls of it.

        So the GPU's clock is the one that this run leads to, and the host is ahead of the GPU.
        """
        call = self._replay or self._call_on(*leaves_of(self.run, self.problem))
        if self.config.cuda_graph and self._replay is None:
            call = self._replay = _captured(call)
        for _ in range(self._calls_within(self.config.settle_ms) if self.call_ms else 1):
            call()
        return call

    def _guarded(self, step: Callable[[], Any]) -> Any:
        """Return what ``step`` returns, or None if it fails on a rank or the run already had."""
        if self.failure is not None:
            return None
        result = message = None
        try:
            result = step()
        except Exception as error:  # a peer may raise anything, and must not end the others
            message, *_ = f"{type(error).__name__}: {error}".splitlines()
        if self.problem.tp_group is not None:
            everyones = failures(message, self.problem.tp_group)
            if len(set(everyones)) > 1:
                texts = enumerate(everyones)
                message = next(f"rank {rank}: {text}" for rank, text in texts if text)
        self.failure = message
        if self.failure is None:
            return result
        # The traceback, gone by now, held the tensors of the call.
        self.release()
        try:
            free_memory(self.problem.hidden.device)
        except RuntimeError as error:
            message = f"{self.run.name} left the device beyond use: {self.failure}"
            raise RuntimeError(message) from error
        return None


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return what replays ``call`` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(keep: Callable[[], Any] = call) -> None:  # the graph reads and writes its tensors
        graph.replay()

    return replay


def free_memory(device: torch.device) -> None:
    """Give unused memory back, and find out here if the device is beyond use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _worst(errors: Iterable[float | None]) -> float | None:
    """Return the largest error that was compared; NaN is larger than any."""
    compared = [error for error in errors if error is not None]
    return max(compared, key=lambda error: (math.isnan(error), error), default=None)
