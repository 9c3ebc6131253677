"""Values of options that are refused, or taken; devices for Triton, and labels on a GPU."""

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from flce_dist import filtered, linear_cross_entropy, vocab_range
from flce_dist.arguments import values
from flce_dist.arguments.check_options import check_impl, check_options
from flce_dist.arguments.options import KEYWORDS, LossOptions
from tests.parallel_problem import complaint
from tests.test_checks import arguments

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
    "z_loss_weight": ("a float that is finite in fp32 and not negative", [*FLOATS, None, -1e-4]),
    "softcap": (
        "None or a float that is finite and above 0 in fp32", [*FLOATS, 0, 0.0, -2.0, 1e-300]
    ),
    "logit_scale": ("a float that is finite and not 0 in fp32", [*FLOATS, None, 0, 0.0, 1e-300]),
    "vocab_size": ("None or an int within [1, 2**63)", [*INTS, 0, -1]),
    "vocab_range": (
        "None or (start, end)", [11, (0,), (0, 5, 11), (0.0, 11.0), (False, True), "ab"]
    ),
    "sequence_parallel": ("a bool", FLAGS),
    "sequence_dim": ("an int that is 0 or 1", [*INTS, None, -1, 2]),
    "reduce_dhidden": ("a bool", FLAGS),
    "reduce_in_fp32": ("a bool", FLAGS),
    "tp_invariant": ("a bool", FLAGS),
    "accumulate_dweight": ("a bool", FLAGS),
    "skip_ignored": ("a bool", FLAGS),
    "schedule": ("one of ('auto', 'recompute', 'cached', 'in_forward')", [*NAMES, None]),
    "max_logits_bytes": ("None or an int within [1, 2**63)", [*INTS, 0, -1]),
    "max_counted": ("None or an int within [1, 2**63)", [*INTS, 0, -1]),
    "impl": ("one of ('triton', 'eager', None)", [*NAMES, "cuda"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_option_of_another_type_or_beyond_its_range(name: str) -> None:
    words, wrong = WRONG[name]
    complaint(linear_cross_entropy, **arguments(vocab_range=(0, 11)))  # equal to (0.0, 11.0)
    for value in [*wrong, *ANYTHING]:
        said = complaint(linear_cross_entropy, **arguments(**{name: value}))
        assert said.startswith(f"{name} must be {words}, got {values.shown(value)}")


def test_every_option_has_wrong_values_here() -> None:
    assert {*WRONG} == {*KEYWORDS}


@pytest.mark.parametrize(("name", "value", "got"), [
    ("softcap", torch.tensor(2.0), "shape () and dtype torch.float32: pass float(softcap)"),
    ("max_counted", torch.tensor([2]), "shape (1,) and dtype torch.int64: pass int(max_counted)"),
    ("temperature", np.ones(9), "array([1., 1., 1., 1., 1., 1., 1., 1., 1.])"),
    ("tp_group", torch.ones(9), "shape (9,) and dtype torch.float32"),
    ("vocab_range", torch.ones(9), "shape (9,) and dtype torch.float32"),
    ("reduction", torch.ones(1), "shape (1,) and dtype torch.float32"),
    ("ignore_index", list(range(99)), f"{str(list(range(99)))[:100]}..."),
])  # fmt: skip
def test_errors_show_little_of_a_value_and_a_way_out(name: str, value: Any, got: str) -> None:
    said = complaint(linear_cross_entropy, **arguments(**{name: value}))
    kind = "a tensor of " if isinstance(value, torch.Tensor) else ""
    assert said.endswith(f", got {kind}{got}")


def test_numbers_of_numpy_are_as_good() -> None:
    """What travels on, to a plan or a compiled operator, are plain numbers."""
    plain: dict[str, Any] = dict(
        ignore_index=-1, label_smoothing=0.5, z_loss_weight=0.25, softcap=None, logit_scale=2.0,
        vocab_size=9, vocab_range=(0, 11), max_logits_bytes=4096, max_counted=5,
    )  # fmt: skip
    numbers = {name: x for name, x in plain.items() if isinstance(x, int | float)}
    kinds: dict[type, Any] = {int: np.int32, float: np.float32}
    numpy = {name: kinds[type(x)](x) for name, x in numbers.items()}
    numpy["vocab_range"] = [np.int64(0), np.uint8(11)]
    options = check_options(LossOptions(**numpy))
    assert options == LossOptions(**plain)
    assert repr(options) == repr(LossOptions(**plain))


WRONG_SHARDS: dict[str, tuple[str, list[Any]]] = {
    "vocab_size": ("an int within [0, 2**63)", [*INTS, *ANYTHING, None, -1]),
    "rank": ("an int within [0, world_size)", [*INTS[:3], *ANYTHING, None, -1]),
    "world_size": ("an int within [1, 2**63)", [*INTS, *ANYTHING, None, 0]),
}


@pytest.mark.parametrize("name", WRONG_SHARDS)
def test_a_shard_of_what_is_no_int(name: str) -> None:
    words, wrong = WRONG_SHARDS[name]
    shard: dict[str, Any] = {"vocab_size": 507, "rank": 3, "world_size": 4}
    for value in wrong:
        said = complaint(vocab_range, **{**shard, name: value})
        assert said.startswith(f"{name} must be {words}, got {values.shown(value)}")
    beyond = "rank must be within [0, world_size = 4), got 4"
    assert complaint(vocab_range, 507, rank=4, world_size=4) == beyond
    of_numpy = vocab_range(**{key: np.int32(x) for key, x in shard.items()})
    assert repr(of_numpy) == "(381, 507)"


@pytest.mark.parametrize("eps", [*FLOATS, None, -0.1, 1, 1.0, ""], ids=str)
def test_thresholds_that_no_probability_has(eps: Any) -> None:
    got = values.shown(eps)
    words = re.escape(f"eps of filtered.schedule must be a float within [0, 1), got {got}")
    with pytest.raises(ValueError, match=f"^{words}$"):
        filtered.schedule(eps)


def test_triton_without_gpu_and_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    message = (
        "impl='triton' needs a CUDA device, hidden is on cpu: use impl='eager' "
        "(or set TRITON_INTERPRET=1 before Python starts, for tests of the kernels)"
    )
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        linear_cross_entropy(**arguments(impl="triton"))


@pytest.mark.parametrize(("capability", "hip", "message"), [
    ((7, 0), None, "needs compute capability 8.0 or newer, cuda:1 has 7.0: use impl='eager'"),
    ((7, 5), None, "needs compute capability 8.0 or newer, cuda:1 has 7.5: use impl='eager'"),
    ((8, 0), None, ""),
    ((12, 0), None, ""),
    ((9, 4), "6.4.43484", "ROCm 6.4.43484: use impl='eager'"),  # an MI300 is no Hopper
])  # fmt: skip
def test_triton_on_other_gpus(capability: Any, hip: Any, message: str, monkeypatch: Any) -> None:
    """Volta, Turing and AMD are refused by name."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    monkeypatch.setattr(torch.version, "hip", hip)
    device = torch.device("cuda", 1)
    check_impl("eager", torch.bfloat16, device)
    if message:
        with pytest.raises(NotImplementedError, match=f"{re.escape(message)}$"):
            check_impl("triton", torch.bfloat16, device)
    else:
        check_impl("triton", torch.bfloat16, device)


WRONG_ON_A_GPU = """
import sys
import torch
from flce_dist import linear_cross_entropy, linear_logprob

hidden = torch.randn(70, 64, device="cuda", dtype=torch.bfloat16)
weight = torch.randn(48, 64, device="cuda", dtype=torch.bfloat16)
labels = torch.arange(70, device="cuda") % 40
labels[::7] = -100
ids = labels.clamp_min(-1)[:, None].contiguous()
temperature = torch.ones(70, device="cuda")

def loss(impl):
    if name == "ids":
        return linear_logprob(hidden, weight, ids, over=over, vocab_size=40, impl=impl)
    most = 60 if token == 0 else None  # ignored until now
    return linear_cross_entropy(
        hidden, weight, labels, vocab_size=40, impl=impl, max_counted=most, temperature=temperature
    )

impl, name, token, wrong, over = sys.argv[1:]
token = int(token)
wrong = int(wrong)
for _ in range(3):  # compiles and loads kernels, for which the host may wait
    loss(impl)
torch.cuda.synchronize()
tensors = {"labels": labels, "temperature": temperature, "ids": ids}
tensors[name][token] = wrong
if impl == "triton":
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda._sleep(1 << 28)  # else the assertion may fail while the host still launches
loss(impl)
print("enqueued", flush=True)
torch.cuda.set_sync_debug_mode("default")
torch.cuda.synchronize()
print("not noticed", flush=True)
"""


LABEL_OR_ID = "labels, and ids of scores, must be within [0, vocab_size) or ignored"


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "eager"])
@pytest.mark.parametrize(("name", "token", "wrong", "said"), [
    pytest.param("labels", 69, 40, LABEL_OR_ID, id="a padding row"),
    pytest.param("labels", 69, -1, LABEL_OR_ID, id="-1"),
    pytest.param("labels", 69, 1 << 40, LABEL_OR_ID, id="beyond 2**31"),
    pytest.param("labels", 0, 4, "max_counted must be at least", id="too many"),
    pytest.param("temperature", 69, 0, "temperature must be finite and above 0", id="temperature"),
    pytest.param("ids", 69, 40, LABEL_OR_ID, id="id beyond the vocabulary"),
    pytest.param("ids", 69, -2, LABEL_OR_ID, id="id below -1"),
    pytest.param("only ids", 69, 40, "ids must be within [0, ", id="id of named ids alone"),
])  # fmt: skip
def test_a_wrong_value_of_a_token_on_a_gpu_ends_the_process(
    impl: str, name: str, token: int, wrong: int, said: str
) -> None:
    """In a process of its own: a device-side assertion leaves the CUDA context unusable.

    The host of the kernels must not wait for it; eager's may, to find rows to rescue.
    """
    over = "vocabulary"
    if name == "only ids":
        name = "ids"
        over = "ids"
    command = [sys.executable, "-c", WRONG_ON_A_GPU, impl, name, str(token), str(wrong), over]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    allowed = ["enqueued"] if impl == "triton" else ["enqueued", ""]
    assert done.stdout.strip() in allowed, done.stderr[-2000:]
    assert "device-side assert" in done.stderr
    assert said in done.stderr
