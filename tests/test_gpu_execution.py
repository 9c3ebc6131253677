"""How the op runs on a GPU: no waiting host, streams, bits, peaks; on a CPU to prove the check."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from flce_dist import filtered, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.schedules.choose import choose_schedule
from tests.devices import (
    SMALL,
    each_device,
    every_schedule,
    host_must_not_wait,
    inputs_on,
    on_cuda,
    options_of,
    our_call,
)
from tests.outcomes import assert_same
from tests.parallel_device_checks import step_on_streams
from tests.parallel_problem import rank_step
from tests.parallel_ranks import Ranks, differing, problem
from tests.problems import METRICS, SCHEDULES, Upstream, each_schedule, make_inputs, run

T, V, H = SMALL["cuda"]


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {"reduction": "mean"},
    "sum": {"reduction": "sum", "ignore_index": 7},
    "none": {"reduction": "none"},
    "softcap": {"softcap": 5.0},
    "metrics": {},
    "metrics and many": {
        "label_smoothing": 0.1, "z_loss_weight": 1e-3, "logit_scale": 0.7, "vocab_size": V - 10
    },
}  # fmt: skip


@pytest.mark.gpu
def test_a_waiting_host_is_noticed():
    with pytest.raises(RuntimeError, match="synchronizing"), host_must_not_wait():
        torch.ones((), device="cuda").item()


@on_cuda
@every_schedule
@pytest.mark.parametrize("name", OPTIONS)
def test_the_host_never_waits(name, schedule, device):
    if (name, schedule) == ("none", "in_forward"):
        pytest.skip("in_forward takes one scalar upstream gradient")
    with_metrics, many = name.startswith("metrics"), name.endswith("many")
    inputs = make_inputs(T, V, H, torch.bfloat16, bias=many, token_weight=many)
    inputs = replace(inputs, labels=inputs.labels.clamp(max=V - 20)).to(torch.device(device))
    if name == "sum":
        inputs = replace(inputs, labels=inputs.labels.where(inputs.labels >= 0, 7))
    # On the device already: a number that is copied there would wait.
    shape = (T,) if name == "none" else ()
    upstream = Upstream(torch.full(shape, 0.7, device=device))
    if with_metrics and schedule != "in_forward":
        upstream = replace(upstream, metrics={m: torch.ones(T, device=device) for m in METRICS})
    call: Any = linear_cross_entropy_with_metrics if with_metrics else our_call
    given = {**options_of(schedule, inputs), **OPTIONS[name]}
    step = functools.partial(run, call, inputs, upstream, **given)
    expected = step()  # compiles
    with host_must_not_wait():
        actual = step()
    assert_same(actual, expected)


@on_cuda
@pytest.mark.parametrize("schedule", [*SCHEDULES, filtered.schedule(2.0**-12)])
def test_a_new_number_of_tokens_compiles_no_kernel(schedule, device):
    compiled: list[str] = []

    def step(T: int) -> None:
        inputs = inputs_on(device, T, 1000, 64, torch.bfloat16)
        run(our_call, inputs, Upstream(), schedule=schedule)

    step(1216)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = lambda **seen: compiled.append(seen["repr"])
        for T in (1217, 1232, 1279):
            step(T)
    assert not compiled


@each_device
@every_schedule
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_calls_without_tokens_between_others(reduction, schedule, device):
    """An empty microbatch has loss 0 and gradients 0, each time that it comes."""
    if (reduction, schedule) == ("none", "in_forward"):
        pytest.skip("in_forward takes one scalar upstream gradient")
    options = options_of(schedule, inputs_on(device, 5, 300, 64, torch.bfloat16))
    options["reduction"] = reduction
    for n in (0, 0, 0, 5, 0):
        inputs = inputs_on(device, n, 300, 64, torch.bfloat16)
        upstream = Upstream(torch.ones((n,) if reduction == "none" else (), device=device))
        outcome = run(our_call, inputs, upstream, **options)
        assert outcome["loss"].isfinite().all()
        assert bool(outcome["dweight"].any()) == (n > 0)


@each_device
@each_schedule
def test_on_a_side_stream(schedule, device):
    ranks = Ranks(None, torch.device(device))
    one, options = problem(ranks.device), {"schedule": schedule, "sequence_parallel": False}
    expected = rank_step(None, one, **options)
    stream = torch.cuda.Stream() if ranks.on_gpu else None
    for turn in range(2):
        mine = step_on_streams(ranks, one, turn, stream, stream, **options)
        assert list(differing("", mine, expected)) == []


@each_device
@every_schedule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_runs_give_equal_bits(dtype, schedule, device):
    """At a size that fills the GPU several times over, with other work in between."""
    size = (2000, 40_000, 256) if device == "cuda" else SMALL[device]
    inputs = inputs_on(device, *size, dtype, bias=True)
    options = {**options_of(schedule, inputs), "label_smoothing": 0.1}
    call = functools.partial(run, linear_cross_entropy_with_metrics, upstream=Upstream(), **options)
    first, second = call(inputs=inputs), call(inputs=inputs)
    assert_same(first, second)
    moved = replace(inputs, hidden=inputs.hidden.roll(1, 0), labels=inputs.labels.roll(1, 0))
    other = run(linear_cross_entropy_with_metrics, moved, Upstream(), **options)
    assert not torch.equal(other["dweight"], first["dweight"])  # another order shows
    assert_same(run(linear_cross_entropy_with_metrics, inputs, Upstream(), **options), first)


MIB = 1 << 20
WORKSPACE = 64 * MIB
SIZES = {"cpu": (512, 32, 8192, 32768), "cuda": (4096, 1024, 32768, 131072)}  # T, H, two V
BUDGETS = {"cpu": 4 * MIB, "cuda": None}  # of recompute


def measured(device: str, V: int, options: Any) -> tuple[int, int]:
    """Peak of a second step beyond inputs and gradients, and the logits that the plan keeps."""
    T, H, *_ = SIZES[device]
    inputs = inputs_on(device, T, V, H, torch.bfloat16)
    hidden, weight = leaves = [x.requires_grad_() for x in (inputs.hidden, inputs.weight)]
    for _ in range(2):
        with peak_memory(inputs.hidden.device) as peak:
            linear_cross_entropy(hidden, weight, inputs.labels, **options).backward()
        for leaf in leaves:
            leaf.grad = None
    planned = choose_schedule(T=T, V=V, itemsize=2, **{"max_logits_bytes": None, **options})
    return peak.bytes - sum(leaf.nbytes for leaf in leaves), planned.logits_bytes


@each_device
def test_recompute_is_flat_in_the_vocabulary(device):
    T, H, *both = SIZES[device]
    options = {"schedule": "recompute", "max_logits_bytes": BUDGETS[device]}
    (narrow, _), (wide, window) = (measured(device, V, options) for V in both)
    print(f"recompute beyond inputs and gradients: {narrow / MIB:.1f} MiB at V = {both[0]}, "
          f"{wide / MIB:.1f} MiB at V = {both[1]}")  # fmt: skip
    assert abs(wide - narrow) <= 8 * MIB
    dhidden_accumulator = 4 * T * H
    assert max(narrow, wide) <= dhidden_accumulator + window + WORKSPACE


@each_device
def test_cached_takes_its_exponentials_and_little_more(device):
    T, H, V, _ = SIZES[device]
    peak, exponentials = measured(device, V, {"schedule": "cached"})
    assert exponentials == 2 * T * V
    assert exponentials <= peak  # else the meter does not see them
    assert peak <= exponentials + 4 * T * H + WORKSPACE


@each_device
def test_a_forward_without_gradients_needs_next_to_nothing(device):
    T, V, H = (512, 16384, 32) if device == "cpu" else (32768, 131072, 512)
    limit = 52 * MIB if device == "cpu" else 44 * MIB  # eager works on windows of 16 MiB
    inputs = inputs_on(device, T, V, H, torch.bfloat16)
    with torch.no_grad():
        for _ in range(2):
            with peak_memory(device) as peak:
                linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels)
    print(f"forward without gradients: {peak.bytes / MIB:.1f} MiB at T = {T}, V = {V}")
    assert peak.bytes <= limit
