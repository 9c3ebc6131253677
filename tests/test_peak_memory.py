"""Peak memory of the op, eager on a CPU: forward and backward, with operators' temporaries.

On small problems, with temporaries and slices as small by comparison as those of large ones.
And what ``peak_memory`` says of programs whose peak is known.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import linear_cross_entropy
from flce_dist.kernels import gemm
from flce_dist.kernels.logits import eager as eager_logits
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.parallel.collectives import CollectiveGather
from flce_dist.schedules.choose import choose_schedule
from tests.problems import each_dtype, each_schedule

MIB = 2**20
T, V, H = 256, 32768, 8  # logits: 32 MiB in fp32, 32 x what the others are together
SCRATCH, SLICE = 2 * MIB, 4 * MIB
WORKSPACE = 3 * SLICE + MIB // 4
"""Five [T, W] temporaries or three slices, and what is [T, H] and [T]."""


@pytest.fixture(scope="module", autouse=True)
def small_temporaries() -> Iterator[None]:
    """A quarter of what the op takes by default, also in ranks, which are forked later."""
    with pytest.MonkeyPatch.context() as patch:
        assert eager_logits.SCRATCH_BYTES == 4 * SCRATCH
        assert gemm._UPCAST_BYTES == 4 * SLICE
        patch.setattr(eager_logits, "SCRATCH_BYTES", SCRATCH)
        patch.setattr(gemm, "_UPCAST_BYTES", SLICE)
        yield


def vector_bytes(T: int = T) -> int:
    """What [T] vectors take between forward and backward, and the mean's divisor."""
    return 3 * T * 4 + 64


def operands(
    dtype: torch.dtype = torch.float32, *, T: int = T, V: int = V, H: int = H
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=g) / H**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (T,), generator=g)


def saved_by(loss: Any) -> dict[int, int]:
    memory = (x.untyped_storage() for x in loss.grad_fn.saved_tensors if x is not None)
    return {x.data_ptr(): x.nbytes() for x in memory}


def step_bytes(tensors: tuple[Tensor, Tensor, Tensor], **options: Any) -> tuple[int, int]:
    """``(peak, saved)``: of forward and backward, and what lives between them beyond operands."""
    hidden, weight, labels = tensors
    with peak_memory("cpu") as peak:
        loss = linear_cross_entropy(hidden, weight, labels, **options)
        saved = saved_by(loss)
        loss.backward()
    for x in tensors:
        saved.pop(x.untyped_storage().data_ptr(), None)
        x.grad = None
    return peak.bytes, sum(saved.values())


def gradient_bytes(hidden: Tensor, weight: Tensor, labels: Tensor) -> int:
    return hidden.nbytes + weight.nbytes


@each_dtype
def test_recompute_does_not_grow_with_the_logits(dtype: torch.dtype) -> None:
    """V x 4: only dweight is larger. T x 2: only dhidden and its accumulator."""
    options = {"schedule": "recompute", "max_logits_bytes": MIB}
    narrow, wide, long = operands(dtype, V=V // 4), operands(dtype), operands(dtype, T=2 * T)
    narrow_peak, narrow_saved = step_bytes(narrow, **options)
    wide_peak, wide_saved = step_bytes(wide, **options)
    long_peak, _ = step_bytes(long, **options)
    slack = MIB // 16
    assert wide_peak - narrow_peak <= gradient_bytes(*wide) - gradient_bytes(*narrow) + slack
    assert long_peak - wide_peak <= 2 * T * H * 4 + slack
    assert wide_peak <= WORKSPACE + MIB + gradient_bytes(*wide)
    assert wide_saved == narrow_saved <= vector_bytes()


@each_schedule
def test_of_the_size_of_hidden_are_dhidden_and_its_accumulator(schedule: Any) -> None:
    """The scaled copy of hidden is in dhidden's buffer. In fp32: a CPU upcasts half operands."""
    T, V, H = 2048, 256, 512
    tensors = operands(T=T, V=V, H=H)
    peak, _ = step_bytes(tensors, schedule=schedule, max_logits_bytes=T * V * 4)
    accumulator, logits = T * H * 4, T * V * 4
    assert peak <= gradient_bytes(*tensors) + accumulator + logits + 2 * SLICE + MIB


def backward_bytes(group: dist.ProcessGroup, T: int, V: int, H: int, **options: Any) -> int:
    hidden, weight, _ = operands(T=T // group.size(), V=V, H=H)
    labels = torch.randint(V, (T,), generator=torch.Generator().manual_seed(0))
    options = {"tp_group": group, "sequence_parallel": True, **options}
    loss = linear_cross_entropy(hidden, weight, labels, **options)
    begin = CollectiveGather.start

    def start(gather: CollectiveGather) -> None:
        begin(gather)
        assert gather._work is not None
        gather._work.wait()

    with mock.patch.object(CollectiveGather, "start", start), peak_memory("cpu") as peak:
        loss.backward()
    return peak.bytes


@pytest.mark.parametrize(("options", "window", "slices"), [
    ({"schedule": "recompute", "max_logits_bytes": 4096 * 256 * 4}, 256, 1),
    ({"schedule": "cached"}, 0, 2),
])  # fmt: skip
def test_gathered_hidden_is_not_copied(pools, options, window, slices):
    """Of [T, H]: hidden, dhidden, and the accumulator or in the end gloo's own copy and a half.

    A gather is awaited where it starts: a thread of gloo's holds a copy until the other rank has
    arrived, however late, and that counts as the op's.
    """
    T, V, H = 4096, 600, 512
    limit = 7 * T * H * 4 // 2 + T * window * 4 + V * H * 4 + slices * SLICE + MIB
    assert max(pools[2].run(backward_bytes, T, V, H, **options)) <= limit


@each_dtype
@pytest.mark.parametrize("budget", [None, 16 * MIB])
@pytest.mark.parametrize("schedule", ["cached", "auto"])
def test_cached_stays_within_its_budget(schedule: Any, budget: int | None, dtype: Any) -> None:
    T = 512  # two chunks: auto is not in_forward
    tensors = operands(dtype, T=T)
    options = {"schedule": schedule, "max_logits_bytes": budget}
    chosen = choose_schedule(T=T, V=V, itemsize=dtype.itemsize, **options)
    peak, saved = step_bytes(tensors, **options)
    window = 0
    if budget is not None:
        assert chosen.logits_bytes <= budget
        assert 0 < chosen.cached_v < V
    elif dtype == torch.float16:
        window = T * chosen.window_v * 2  # its bf16 cache is converted a window at a time
    assert peak <= chosen.logits_bytes + window + WORKSPACE + gradient_bytes(*tensors)
    assert T * chosen.cached_v * dtype.itemsize <= saved
    assert saved <= T * chosen.cached_v * dtype.itemsize + vector_bytes(T)


@each_schedule
def test_max_counted_takes_the_memory_of_so_many_tokens(schedule: Any) -> None:
    """Beside it dhidden, whose other rows are 0, a copy of N rows of hidden, and places."""
    T, N = 2048, 64
    hidden, weight, labels = operands(T=T)
    labels[torch.arange(T) % (T // N) != 0] = -100
    peak, saved = step_bytes(operands(T=N), schedule=schedule)
    of_tokens = hidden.nbytes + N * H * 4 + 5 * T * 8
    found, found_saved = step_bytes((hidden, weight, labels), max_counted=N, schedule=schedule)
    assert found <= peak + of_tokens <= T * V * 4 // 8
    assert found_saved <= saved + of_tokens


@each_dtype
@pytest.mark.parametrize("tokens", [256, 512, 1024])
def test_in_forward_stays_within_its_chunk(tokens: int, dtype: torch.dtype) -> None:
    """dweight accumulates in fp32; 256 tokens are the smallest chunk, 1024 are all.

    Gradients are kept in the operands' dtype, but fp16 needs fp32's range until a loss scale
    arrives and a mean divides.
    """
    T, V = 1024, 8192
    hidden, weight, _ = tensors = operands(dtype, T=T, V=V)
    chunk = tokens * V * dtype.itemsize
    peak, saved = step_bytes(tensors, schedule="in_forward", max_logits_bytes=chunk)
    assert peak <= chunk + WORKSPACE + T * H * 4 + V * H * 4
    width = 4 if dtype == torch.float16 else dtype.itemsize
    assert saved <= (hidden.numel() + weight.numel()) * width + 64  # scalars


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("budget", [None, 1], ids=["one chunk", "several chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_of_in_forward_needs_a_second_dweight_only_if_the_graph_is_kept(
    dtype: torch.dtype, budget: int | None, retain_graph: bool
) -> None:
    """Otherwise the saved gradients are returned and become ``.grad`` without a copy."""
    hidden, weight, labels = operands(dtype, T=300, V=4096, H=256)
    how: Any = {"schedule": "in_forward", "max_logits_bytes": budget}
    loss = linear_cross_entropy(hidden, weight, labels, **how)
    saved = saved_by(loss)
    upstream = torch.tensor(0.3)
    with peak_memory("cpu") as peak:
        loss.backward(upstream, retain_graph=retain_graph)
    for leaf in (hidden, weight):
        assert leaf.grad is not None
        assert (leaf.grad.data_ptr() in saved) is not retain_graph
    gradients = hidden.nbytes + weight.nbytes
    assert peak.bytes >= gradients if retain_graph else peak.bytes <= MIB // 16


@each_dtype
@pytest.mark.parametrize("schedule", ["recompute", "cached", "auto", "in_forward"])
@pytest.mark.parametrize("frozen", [False, True], ids=["no_grad", "frozen operands"])
def test_without_gradients_nothing_is_kept(frozen: bool, schedule: Any, dtype: Any) -> None:
    hidden, weight, labels = operands(dtype)
    hidden.requires_grad_(not frozen)
    weight.requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen), peak_memory("cpu") as peak:
        loss = linear_cross_entropy(hidden, weight, labels, schedule=schedule)
    assert loss.grad_fn is None
    assert peak.bytes <= WORKSPACE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", ["recompute", "in_forward"])
def test_a_frozen_weight_costs_no_gradient(schedule: Any, dtype: torch.dtype) -> None:
    whole = operands(dtype)
    frozen = (whole[0], whole[1].detach(), whole[2])
    options = {"schedule": schedule, "max_logits_bytes": MIB}
    (peak, saved), (frozen_peak, frozen_saved) = (step_bytes(x, **options) for x in (whole, frozen))
    assert frozen_peak <= peak
    assert frozen_saved <= T * H * 4 + vector_bytes()
    if schedule == "in_forward":
        assert saved - frozen_saved >= V * H * dtype.itemsize
        assert peak - frozen_peak >= V * H * dtype.itemsize


def mib(n: int) -> torch.Tensor:
    return torch.empty(n * MIB, dtype=torch.uint8)


def freed_in_between() -> None:
    a, b = mib(3), mib(2)
    del a, b
    mib(4)


def kept_with_a_view() -> Any:
    kept = mib(2)
    return kept, kept.view(torch.int32)[1:]


BEFORE = torch.randn(512, 512, requires_grad=True)  # 1 MiB
LOSS = BEFORE.exp().sum()


@pytest.mark.parametrize(("program", "expected_mib"), [
    (freed_in_between, 5),
    (kept_with_a_view, 2),
    (lambda: BEFORE.exp().sum(), 1),  # saves exp(x)
    (lambda: LOSS.backward(retain_graph=True), 1),  # dx
    (lambda: torch.logsumexp(BEFORE.detach(), dim=1), 1),  # exponentiates a copy of x
])  # fmt: skip
def test_the_peak_of_a_program(program: Callable[[], Any], expected_mib: int) -> None:
    BEFORE.grad = None
    with peak_memory("cpu") as peak:
        kept = program()
    del kept
    assert abs(peak.bytes - expected_mib * MIB) < 0.1 * MIB


def test_overlapping_blocks_are_refused_and_leave_it_usable() -> None:
    with pytest.raises(RuntimeError, match="must not overlap"), peak_memory("cpu"):
        with peak_memory("cpu"):
            pass
    with peak_memory("cpu") as peak:
        mib(1)
    assert peak.bytes >= MIB
