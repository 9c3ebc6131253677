"""Each complaint of checks.py, word by word: the argument, what was expected, what came."""

import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.op import checks
from flce_dist.options import DECLARED, LossOptions
from flce_dist.testing import run_ranks

T, V, H = 6, 11, 4


def arguments(**changes: Any) -> dict[str, Any]:
    return {
        "hidden": torch.zeros(T, H, requires_grad=True),
        "weight": torch.zeros(V, H, requires_grad=True),
        "labels": torch.zeros(T, dtype=torch.int64),
        **changes,
    }


NAN, INF = float("nan"), float("inf")
INTS: list[Any] = [True, 1.0, 1e9, 1 << 63, 1 << 70]  # that no option is
FLOATS: list[Any] = [True, NAN, INF, -INF, 1e300, 10**400, 1j, np.float64("nan")]
FLAGS: list[Any] = [None, 0, 1, 1.0, np.True_]
NAMES: list[Any] = ["", "fast", "Mean", ("mean",), 0, True]
ANYTHING: list[Any] = ["1", b"1", [1], torch.ones(()), torch.ones(3), object]

# What each option must be, and values that are not.
WRONG: dict[str, tuple[str, list[Any]]] = {
    "reduction": ("one of ('none', 'sum', 'mean')", [*NAMES, None]),
    "ignore_index": ("an int within [-2**63, 2**63)", [*INTS, None, -(1 << 63) - 1]),
    "label_smoothing": ("a float within [0, 1]", [*FLOATS, None, -0.1, 1.5, 2]),
    "z_loss_weight": ("a float that is finite in fp32", [*FLOATS, None]),
    "softcap": (
        "None or a float that is finite and above 0 in fp32", [*FLOATS, 0, 0.0, -2.0, 1e-300]
    ),
    "logit_scale": ("a float that is finite and not 0 in fp32", [*FLOATS, None, 0, 0.0, 1e-300]),
    "vocab_size": ("None or an int within [1, 2**63)", [*INTS, 0, -1]),
    "vocab_range": (
        "None or (start, end)", [11, (0,), (0, 5, 11), (0.0, 11.0), (False, True), "ab"]
    ),
    "sequence_parallel": ("a bool", FLAGS),
    "reduce_dhidden": ("a bool", FLAGS),
    "reduce_in_fp32": ("a bool", FLAGS),
    "tp_invariant": ("a bool", FLAGS),
    "schedule": ("one of ('auto', 'recompute', 'cached', 'in_forward')", [*NAMES, None]),
    "max_logits_bytes": ("None or an int within [1, 2**63)", [*INTS, 0, -1]),
    "impl": ("one of ('triton', 'eager', None)", [*NAMES, "cuda"]),
}  # fmt: skip

# (changed arguments, whole message), by the function of checks.py that complains.
OPTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"sequence_parallel": True, "reduce_dhidden": False},
        "reduce_dhidden=False leaves the sum over ranks to the caller, but "
        "sequence_parallel=True makes it part of the reduce-scatter; drop one of the two",
    ),
    (
        {"reduce_in_fp32": True, "reduce_dhidden": False},
        "reduce_in_fp32=True sums dhidden over ranks in fp32, but reduce_dhidden=False leaves "
        "the sum over ranks to the caller; drop one of the two",
    ),
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"schedule": "in_forward", "reduction": "none"},
        "schedule='in_forward' needs a scalar upstream gradient, so reduction='none' needs "
        "schedule='recompute' or 'cached'",
    ),
    *(
        (
            {"schedule": schedule, "softcap": 5.0, "label_smoothing": 0.1},
            f"schedule='{schedule}' keeps exponentials, but label_smoothing with softcap needs the "
            "logits; use schedule='recompute'",
        )
        for schedule in ("cached", "in_forward")
    ),
    (
        {"impl": "triton", "hidden": torch.zeros(T, H).double(),
         "weight": torch.zeros(V, H).double()},
        "impl='triton' computes in float32, bfloat16 and float16; hidden is torch.float64: "
        "use impl='eager'",
    ),
]  # fmt: skip

FLOAT_DTYPES = "torch.float32, torch.bfloat16, torch.float16, torch.float64"
KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "be a torch.Tensor, got NoneType"),
    "a string": (lambda: "hidden", "be a torch.Tensor, got str"),
    "a list": (lambda: [0.0], "be a torch.Tensor, got list"),
    "sparse": (
        lambda: torch.eye(H).to_sparse(), "be a dense tensor (torch.strided), got torch.sparse_coo"
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.zeros(2, H)], layout=torch.jagged),
        "be a dense tensor (torch.strided), got a nested tensor",
    ),
    "nested, strided": (
        lambda: torch.nested.nested_tensor([torch.zeros(2, H)]),
        "be a dense tensor (torch.strided), got a nested tensor",
    ),
    "bool": (lambda: torch.zeros(T, dtype=torch.bool), f"be one of {FLOAT_DTYPES}, got torch.bool"),
    "complex": (
        lambda: torch.zeros(T, dtype=torch.complex64),
        f"be one of {FLOAT_DTYPES}, got torch.complex64",
    ),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.zeros(T, H), 0.1, 0, torch.qint8),
        f"be one of {FLOAT_DTYPES}, got torch.qint8",
    ),
    "meta": (lambda: torch.zeros(T, H, device="meta"), "hold data, got a tensor on device meta"),
}  # fmt: skip
TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.zeros(())}, "hidden must be [..., H] with H >= 1, got ()"),
    ({"hidden": torch.zeros(T, 0)}, "hidden must be [..., H] with H >= 1, got (6, 0)"),
    ({"weight": torch.zeros(V, 3)}, "weight must be [V, H] with H = 4 from hidden, got (11, 3)"),
    ({"weight": torch.zeros(H)}, "weight must be [V, H] with H = 4 from hidden, got (4,)"),
    (
        {"weight": torch.zeros(V, H).bfloat16()},
        "weight must have hidden's dtype torch.float32, got torch.bfloat16: pass "
        "weight.to(torch.float32) or hidden.to(torch.bfloat16), or call under torch.autocast; "
        "the gradient of each has the dtype that was passed",
    ),
    (
        {"labels": torch.zeros(T)},
        "labels must be one of torch.int64, torch.int32, got torch.float32",
    ),
    ({"bias": torch.zeros(V, 1)}, "bias must be [V] with V = 11 from weight, got (11, 1)"),
    (
        {"bias": torch.zeros(V).half()},
        "bias must have hidden's dtype torch.float32, got torch.float16: pass "
        "bias.to(torch.float32) or hidden.to(torch.float16), or call under torch.autocast; "
        "the gradient of each has the dtype that was passed",
    ),
    (
        {"token_weight": torch.ones(T, 1)},
        "token_weight must have labels' shape (6,), got (6, 1)",
    ),
    (
        {"token_weight": torch.ones(T, dtype=torch.bool)},
        f"token_weight must be one of {FLOAT_DTYPES}, got torch.bool",
    ),
    (
        {"token_weight": torch.ones(T, requires_grad=True)},
        "token_weight must have requires_grad=False, since it gets no gradient, got True",
    ),
]

GROUP: list[tuple[dict[str, Any], str]] = [
    (
        {"sequence_parallel": True},
        "sequence_parallel=True needs a tp_group, got tp_group=None",
    ),
    (
        {"tp_group": "tp"},
        "tp_group must be None or a torch.distributed.ProcessGroup that this rank belongs to, "
        "got 'tp'",
    ),
    (
        {"tp_group": -100},  # torch.distributed.GroupMember.NON_GROUP_MEMBER, of other ranks
        "tp_group must be None or a torch.distributed.ProcessGroup that this rank belongs to, "
        "got -100",
    ),
]

SHAPES: list[tuple[dict[str, Any], str]] = [
    (
        {"labels": torch.zeros(T + 1, dtype=torch.int64)},
        "labels must be (6,) from hidden (6, 4), got (7,)",
    ),
    (
        {"hidden": torch.zeros(2, 3, H)},
        "labels must be (2, 3) from hidden (2, 3, 4), got (6,)",
    ),
    (
        {"weight": torch.zeros(0, H)},
        "weight must have at least one row without vocab_range, got V = 0",
    ),
    (
        {"vocab_size": 12},
        "vocab_size must be within [1, 11], the rows of 1 shards of 11, got 12",
    ),
    (
        {"vocab_range": (0, 11)},
        "vocab_size must be given with vocab_range, since one rank's rows do not determine it, "
        "got None",
    ),
    (
        {"vocab_range": (0, 10), "vocab_size": 11},
        "vocab_range must be half-open (start, end) with end - start = 11 from weight, got (0, 10)",
    ),
    (
        {"vocab_range": (-1, 10), "vocab_size": 11},
        "vocab_range must be half-open (start, end) with end - start = 11 from weight, "
        "got (-1, 10)",
    ),
    (
        {"vocab_range": (1, 12), "vocab_size": 11},
        "vocab_range of the 1 ranks must cover [0, 11), got (1, 12) on rank 0",
    ),
    (
        {"vocab_range": (0, 11), "vocab_size": 12},
        "vocab_range of the 1 ranks must cover [0, 12), got (0, 11) on rank 0",
    ),
]

LABELS: list[tuple[dict[str, Any], str]] = [
    (
        {"labels": torch.tensor([0, 1, 11, 2, 12, -100])},
        "labels must be within [0, 11) or ignore_index -100, got 11 at token 2",
    ),
    (
        {"labels": torch.tensor([0, 1, 2, -1, 2, -100])},
        "labels must be within [0, 11) or ignore_index -100, got -1 at token 3",
    ),
    (
        {"labels": torch.tensor([-100, 1, 2, 3, 2, 1]), "ignore_index": -1},
        "labels must be within [0, 11) or ignore_index -1, got -100 at token 0",
    ),
    (
        {"labels": torch.tensor([0, 1, 2, 3, 9, 1]), "vocab_size": 9},
        "labels must be within [0, 9) or ignore_index -100, got 9 at token 4",
    ),
]

VALUE_ERRORS = [*OPTIONS, *TENSORS, *GROUP, *SHAPES, *LABELS]


@pytest.mark.parametrize("call", [linear_cross_entropy, linear_cross_entropy_with_metrics])
@pytest.mark.parametrize(("changes", "message"), VALUE_ERRORS, ids=[m for _, m in VALUE_ERRORS])
def test_value_errors(changes: dict[str, Any], message: str, call: Any) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(**arguments(**changes))


@pytest.mark.parametrize("name", WRONG)
def test_an_option_of_another_type_or_beyond_its_range(name: str) -> None:
    words, values = WRONG[name]
    for value in [*values, *ANYTHING]:
        shown = "a Tensor" if isinstance(value, torch.Tensor) else repr(value)
        with pytest.raises(ValueError) as error:
            linear_cross_entropy(**arguments(**{name: value}))
        assert str(error.value) == f"{name} must be {words}, got {shown}"


def test_every_option_has_wrong_values_here() -> None:
    assert {*WRONG, "with_metrics"} == {*DECLARED}


@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:.*quantized tensor")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["hidden", "weight", "labels", "bias", "token_weight"])
def test_tensors_of_another_kind(name: str, kind: str) -> None:
    """Under autocast, too, which looks at operands first."""
    make, message = KINDS[kind]
    value = make()
    if name == "labels":
        message = message.replace(FLOAT_DTYPES, "torch.int64, torch.int32")
        value = value.long() if kind in ("sparse", "meta") else value
    if value is None and name in ("bias", "token_weight"):
        return
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            with pytest.raises(ValueError) as error:
                linear_cross_entropy(**arguments(**{name: value}))
            assert str(error.value) == f"{name} must {message}"


def test_numbers_of_numpy_are_as_good() -> None:
    """The same result, and plain numbers in what travels on: a plan, a compiled operator."""
    plain: dict[str, Any] = dict(
        ignore_index=-1, label_smoothing=0.5, z_loss_weight=0.25, softcap=None, logit_scale=2.0,
        vocab_size=9, vocab_range=(0, 11), max_logits_bytes=4096,
    )  # fmt: skip
    numpy = {
        name: np.int32(x) if isinstance(x, int) else np.float32(x)
        for name, x in plain.items()
        if isinstance(x, int | float)
    }
    numpy["vocab_range"] = [np.int64(0), np.uint8(11)]
    options = checks.check_options(LossOptions(**numpy))
    assert options == LossOptions(**plain)
    assert repr(options) == repr(LossOptions(**plain))
    hidden = torch.randn(T, H)
    losses = [linear_cross_entropy(**arguments(hidden=hidden, **x)) for x in (plain, numpy)]
    assert torch.equal(*losses)


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_combinations_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        linear_cross_entropy(**arguments(**changes))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_what_is_refused_names_a_schedule_that_works(reduction: str) -> None:
    tied = {"softcap": 5.0, "label_smoothing": 0.1, "reduction": reduction}
    for schedule in ("recompute", "auto"):
        linear_cross_entropy(**arguments(schedule=schedule, **tied)).backward()


@pytest.mark.parametrize(
    ("hidden", "labels", "message"),
    [
        (
            (3, H), (3,),
            "labels must be (6,) from hidden (3, 4) for the tokens of all 2 ranks, got (3,)",
        ),
        ((H,), (), "hidden must be [T / P, ..., H] under sequence_parallel=True, got (4,)"),
    ],
)  # fmt: skip
def test_shapes_under_sequence_parallelism(
    hidden: tuple[int, ...], labels: tuple[int, ...], message: str
) -> None:
    changes = {
        "hidden": torch.zeros(hidden),
        "labels": torch.zeros(labels, dtype=torch.int64),
        "sequence_parallel": True,
    }

    def rank(tp_group: torch.distributed.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            linear_cross_entropy(**arguments(tp_group=tp_group, **changes))

    run_ranks(rank, 2)


def test_shards_must_cover_the_vocabulary() -> None:
    def rank(tp_group: torch.distributed.ProcessGroup) -> str:
        start = 11 * tp_group.rank() + 1 - tp_group.rank()
        with pytest.raises(ValueError) as error:
            linear_cross_entropy(
                **arguments(tp_group=tp_group, vocab_size=23, vocab_range=(start, start + 11))
            )
        return str(error.value)

    first, last = run_ranks(rank, 2)
    assert first == "vocab_range of the 2 ranks must cover [0, 23), got (1, 12) on rank 0"
    assert last == "vocab_range of the 2 ranks must cover [0, 23), got (11, 22) on rank 1"


def test_vocab_size_counts_the_rows_of_all_ranks() -> None:
    message = "vocab_size must be within [1, 22], the rows of 2 shards of 11, got 23"

    def rank(tp_group: torch.distributed.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            linear_cross_entropy(**arguments(tp_group=tp_group, vocab_size=23))

    run_ranks(rank, 2)


def test_triton_without_gpu_and_interpreter() -> None:
    """In a process of its own: this one may be interpreted."""
    program = """
import os, torch
os.environ.pop("TRITON_INTERPRET", None)
from flce_dist import linear_cross_entropy
x, y = torch.zeros(2, 16), torch.zeros(2, dtype=torch.int64)
try:
    linear_cross_entropy(x, x, y, impl="triton")
except NotImplementedError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (
        "impl='triton' needs a CUDA device, hidden is on cpu: use impl='eager' "
        "(or set TRITON_INTERPRET=1 before Python starts, for tests of the kernels)"
    )


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (12, 0)])
def test_triton_on_older_gpus(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Volta and Turing are refused by name; the device is asked once, not in every call."""
    asked = []

    def get_device_capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", get_device_capability)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    checks._capability.cache_clear()
    hidden: Any = SimpleNamespace(
        dtype=torch.bfloat16, is_cuda=True, device=torch.device("cuda", 1)
    )
    for _ in range(2):
        if capability >= (8, 0):
            checks.check_impl("triton", hidden)
            continue
        major, minor = capability
        message = (
            "impl='triton' needs compute capability 8.0 or newer, cuda:1 has "
            f"{major}.{minor}: use impl='eager'"
        )
        with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
            checks.check_impl("triton", hidden)
        checks.check_impl("eager", hidden)
    assert asked == [torch.device("cuda", 1)]
    checks._capability.cache_clear()


def test_labels_of_every_kind_pass() -> None:
    labels = torch.tensor([0, V - 1, -100, 3, -100, 5])
    checks.check_labels(labels, V, -100)
    checks.check_labels(labels[:0], V, -100)


WRONG_LABEL_ON_A_GPU = """
import sys
import torch
from flce_dist import linear_cross_entropy

hidden = torch.randn(70, 64, device="cuda", dtype=torch.bfloat16)
weight = torch.randn(48, 64, device="cuda", dtype=torch.bfloat16)
labels = torch.arange(70, device="cuda") % 40
labels[::7] = -100

def loss(impl):
    return linear_cross_entropy(hidden, weight, labels, vocab_size=40, impl=impl)

impl, wrong = sys.argv[1], int(sys.argv[2])
loss(impl)  # compiles and loads kernels, for which the host may wait
torch.cuda.synchronize()
labels[69] = wrong
if impl == "triton":
    torch.cuda.set_sync_debug_mode("error")
loss(impl)
print("enqueued", flush=True)
torch.cuda.set_sync_debug_mode("default")
torch.cuda.synchronize()
print("not noticed", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("impl", "wrong"),
    [("triton", 40), ("triton", -1), ("triton", 1 << 40), ("eager", 40)],
    ids=["a padding row", "-1", "beyond 2**31", "eager"],
)
def test_a_wrong_label_on_a_gpu_ends_the_process(impl: str, wrong: int) -> None:
    """In a process of its own: a device-side assertion leaves the CUDA context unusable.

    The host of the kernels must not wait for it; eager's waits anyway, to find rows to rescue.
    """
    command = [sys.executable, "-c", WRONG_LABEL_ON_A_GPU, impl, str(wrong)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout.strip() == ("enqueued" if impl == "triton" else ""), done.stderr[-2000:]
    assert "device-side assert" in done.stderr
    assert "labels must be within [0, vocab_size)" in done.stderr
