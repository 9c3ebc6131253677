"""Calls that are replayed return what they returned before; what may not be replayed never is."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from torch import Tensor

from flce_dist import filtered, replay
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.testing import run_ranks
from tests.outcomes import Outcome, assert_same
from tests.parallel_problem import Problem, rank_step
from tests.problems import (
    Upstream,
    make_inputs,
    metric_upstream,
    on_a_gpu,
    per_token_upstream,
    run_op,
)

interpreted = pytest.mark.usefixtures("one_launch_at_a_time")
T, V, H = 40, 150, 16

CASES: dict[str, tuple[Upstream, dict[str, Any]]] = {
    "recompute": (Upstream(), {"schedule": "recompute", "max_logits_bytes": T * 64 * 4}),
    "cached": (Upstream(), {"schedule": "cached", "label_smoothing": 0.1}),
    "in_forward": (Upstream(0.5), {"schedule": "in_forward", "softcap": 4.0}),
    "chunks": (Upstream(), {"schedule": "in_forward", "max_logits_bytes": 16 * V * 4}),
    "filtered": (Upstream(), {"schedule": filtered.schedule(2.0**-5)}),
    "counted": (Upstream(), {"schedule": "cached", "max_counted": 36}),
    "skips": (Upstream(), {"schedule": "cached", "skip_ignored": True}),
    "metrics": (
        Upstream(per_token_upstream(T), metric_upstream(T, "lse", "entropy")),
        {"schedule": "cached", "reduction": "none"},
    ),
}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    run: list[Any] = []
    record = replay.Recorder.program

    def noting(self: replay.Recorder, results: Any) -> Any:
        program = record(self, results)
        assert program is not None

        def noted(*inputs: Any) -> Any:
            run.append(program)
            return program(*inputs)

        return noted

    monkeypatch.setattr(replay.Recorder, "program", noting)
    return run


DTYPES = [torch.float32, torch.float16]


@interpreted
@pytest.mark.parametrize(("impl", "case", "dtype"), [
    *(("triton", *of_one) for of_one in zip(CASES, 4 * DTYPES, strict=True)),
    *(pytest.param(*on_a_gpu.values, *x, marks=on_a_gpu.marks) for x in product(CASES, DTYPES)),
], ids=str)  # fmt: skip
def test_one_rank(programs: list[Any], impl: str, case: str, dtype: torch.dtype) -> None:
    upstream, options = CASES[case]

    def outcome(seed: int) -> Outcome:
        inputs = make_inputs(T, V, H, dtype, seed=seed, bias=True, token_weight=True)
        return run_op(inputs, upstream, impl=impl, **options)

    seen, recorded = outcome(0), outcome(1)
    assert not programs
    assert_same(outcome(0), seen)
    assert_same(outcome(1), recorded)
    assert len(programs) == 4


@interpreted
def test_a_profiler_of_triton_sees_every_launch(programs: list[Any]) -> None:
    inputs, hooks = make_inputs(T, V, H), triton.knobs.runtime.launch_enter_hook

    def hook(_: Any) -> None:
        pass

    for _ in range(2):
        run_op(inputs, Upstream(), impl="triton", schedule="cached")
    hooks.add(hook)
    try:
        run_op(inputs, Upstream(), impl="triton", schedule="cached")
    finally:
        hooks.remove(hook)
    assert not programs
    run_op(inputs, Upstream(), impl="triton", schedule="cached")
    assert len(programs) == 2


@interpreted
@pytest.mark.parametrize(("case", "sequence_parallel"), [
    *((case, True) for case in ("recompute", "cached", "chunks", "filtered", "counted")),
    *((case, False) for case in ("recompute", "chunks")),
])  # fmt: skip
def test_ranks(programs: list[Any], case: str, sequence_parallel: bool) -> None:
    def rank(group: dist.ProcessGroup) -> list[Any]:
        problems = [Problem(T=T, H=H, V_all=V, seed=seed) for seed in (0, 1)]
        how = {"impl": "triton", "sequence_parallel": sequence_parallel, **CASES[case][1]}
        return [rank_step(group, problem, **how).tensors() for problem in 2 * problems]

    for first, recorded, *replays in run_ranks(rank, 2):
        for one, other in zip((*first, *recorded), (*replays[0], *replays[1]), strict=True):
            assert torch.equal(one, other)
    assert len(programs) == 8


def calls(issue: Callable[..., Any], *inputs: Tensor | None, facts: Any = None) -> list[Any]:
    programs: dict[Any, Any] = {}
    results = [replay.replayed(programs, facts, inputs, lambda: issue(*inputs)) for _ in range(3)]
    return [*results, sum(callable(program) for program in programs.values())]


outside = torch.ones(3)


@pytest.mark.parametrize(("issue", "is_replayed"), [
    pytest.param(lambda x: (x * 2.0, None), True, id="operation"),
    pytest.param(lambda x: torch.cat([x, *x.split(1)])[1:].t(), True, id="lists and views"),
    pytest.param(lambda x: x + outside, False, id="a tensor from elsewhere"),
    pytest.param(lambda x: x * x.sum().item(), False, id="a number that was read"),
    pytest.param(lambda x: x[x > 1.0] if x.sum() else x, False, id="a branch on data"),
    pytest.param(lambda x: x[x > 1.0], False, id="a shape that data decides"),
    pytest.param(lambda x: torch.tensor(3.0) * x, False, id="a tensor made of numbers"),
])  # fmt: skip
def test_what_is_replayed(issue: Callable[..., Any], is_replayed: bool) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    *results, programs = calls(issue, x)
    assert programs == is_replayed
    for result in results:
        torch.testing.assert_close(result, issue(x), rtol=0.0, atol=0.0)


def test_memory_is_freed_where_it_was() -> None:
    def issue(x: Tensor) -> Tensor:
        total = x.sum()
        for factor in range(1, 4):
            scaled = x * factor
            total = total + scaled.clone().sum()
        del scaled
        return total + x.repeat(2).sum()

    x, programs, peaks = torch.ones(1 << 16), dict[Any, Any](), []
    for _ in range(4):
        with peak_memory("cpu") as peak:
            replay.replayed(programs, None, (x,), partial(issue, x))
        peaks.append(peak.bytes)
    assert callable(*programs.values())
    # Recording itself takes 8 bytes more on torch 2.9; a replay takes none.
    assert len({peaks[0], *peaks[2:]}) == 1 and abs(peaks[1] - peaks[0]) <= 8
    assert 2 * x.nbytes < peaks[0] < 3.1 * x.nbytes


def test_a_tensor_given_twice_may_be_two_tensors_later() -> None:
    x, y, programs = torch.ones(3), torch.zeros(3), dict[Any, Any]()
    for other in (x, x, y):
        total = replay.replayed(programs, None, (x, other), partial(torch.add, x, other))
    assert torch.equal(total, x)


def test_each_fact_has_its_own_program() -> None:
    buffer, programs = torch.zeros(64), dict[Any, Any]()
    inputs = (
        buffer[:8].view(2, 4), buffer[:8].view(4, 2), buffer[:8].view(2, 4).t(),
        buffer[1:9].view(2, 4), buffer[:8].view(2, 4).int(),
    )  # fmt: skip
    for x, factor in 3 * list(product(inputs, (1.0, 2.0))):
        scaled = replay.replayed(programs, factor, (x,), partial(torch.mul, x, factor))
        assert torch.equal(scaled, x * factor)
    assert len(programs) == 2 * len(inputs) and all(map(callable, programs.values()))


def test_small_memory_of_launches_is_one_allocation() -> None:
    """But what is returned, given to an operator or large has its own."""
    seen: list[list[int]] = []

    def launch(*addresses: int) -> None:
        seen.append(list(addresses))

    def issue() -> tuple[Tensor, Tensor]:
        made = [torch.empty(n) for n in (3, 100, 4, 5, 1 << 16)]
        noted, addresses = replay.recorder(), [y.data_ptr() for y in made]
        if noted is None:
            launch(*addresses)
        else:
            noted.issued(noted.constant(launch), launch, addresses, [*map(noted.address, made)])
        return made[2].fill_(1.0), made[3]

    programs = dict[Any, Any]()
    for _ in range(3):
        filled, returned = replay.replayed(programs, None, (), issue)
        assert filled.eq(1.0).all() and len(returned) == 5
    a, b, *others = seen[2]
    assert b - a == 256 and {filled.data_ptr(), returned.data_ptr()} == set(others[:2])
    assert others[2] not in range(a, a + 512)


def test_what_is_issued_in_its_own_way() -> None:
    class Adder:
        def __init__(self, x: Tensor) -> None:
            self.total, self.parts = x.clone(), 0

        def add(self, x: Tensor) -> None:
            self.total, self.parts = self.total + x.sum().item(), self.parts + 1

    def issue(x: Tensor) -> Tensor:
        adder = replay.issued(Adder, x)
        adder.add(x)
        adder.add(2 * x)
        assert adder.parts == 2
        return adder.total

    x, programs = torch.tensor([1.0, 2.0, 3.0]), dict[Any, Any]()
    for y in (x, x, 2 * x):
        total = replay.replayed(programs, None, (y,), partial(issue, y))
        assert torch.equal(total, y + 3 * y.sum())
    assert callable(*programs.values())
