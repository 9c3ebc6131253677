"""Devices that impl="triton" refuses, and wrong labels on a GPU."""

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy
from flce_dist.op import checks
from tests.test_checks import arguments


def test_triton_without_gpu_and_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    message = (
        "impl='triton' needs a CUDA device, hidden is on cpu: use impl='eager' "
        "(or set TRITON_INTERPRET=1 before Python starts, for tests of the kernels)"
    )
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        linear_cross_entropy(**arguments(impl="triton"))


@pytest.mark.parametrize(
    ("capability", "hip", "message"),
    [
        ((7, 0), None, "needs compute capability 8.0 or newer, cuda:1 has 7.0: use impl='eager'"),
        ((7, 5), None, "needs compute capability 8.0 or newer, cuda:1 has 7.5: use impl='eager'"),
        ((8, 0), None, ""),
        ((12, 0), None, ""),
        ((9, 4), "6.4.43484", "ROCm 6.4.43484: use impl='eager'"),  # an MI300 is no Hopper
    ],
)
def test_triton_on_other_gpus(capability: Any, hip: Any, message: str, monkeypatch: Any) -> None:
    """Volta, Turing and AMD are refused by name."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    monkeypatch.setattr(torch.version, "hip", hip)
    device = torch.device("cuda", 1)
    hidden: Any = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True, device=device)
    checks.check_impl("eager", hidden)
    if message:
        with pytest.raises(NotImplementedError, match=f"{re.escape(message)}$"):
            checks.check_impl("triton", hidden)
    else:
        checks.check_impl("triton", hidden)


WRONG_LABEL_ON_A_GPU = """
import sys
import torch
from flce_dist import linear_cross_entropy

hidden = torch.randn(70, 64, device="cuda", dtype=torch.bfloat16)
weight = torch.randn(48, 64, device="cuda", dtype=torch.bfloat16)
labels = torch.arange(70, device="cuda") % 40
labels[::7] = -100

def loss(impl):
    most = 60 if token == 0 else None  # ignored until now
    return linear_cross_entropy(
        hidden, weight, labels, vocab_size=40, impl=impl, max_counted=most
    )

impl, token, wrong = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for _ in range(3):  # compiles and loads kernels, for which the host may wait; records the call
    loss(impl)
torch.cuda.synchronize()
labels[token] = wrong
if impl == "triton":
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda._sleep(1 << 28)  # else the assertion may fail while the host still launches
loss(impl)
print("enqueued", flush=True)
torch.cuda.set_sync_debug_mode("default")
torch.cuda.synchronize()
print("not noticed", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("impl", "token", "wrong", "said"),
    [
        *(("triton", 69, wrong, "labels must be within [0") for wrong in (40, -1, 1 << 40)),
        ("eager", 69, 40, "labels must be within [0"),
        *((impl, 0, 4, "max_counted must be at least") for impl in ("triton", "eager")),
    ],
    ids=["a padding row", "-1", "beyond 2**31", "eager", "too many", "too many, eager"],
)
def test_a_wrong_label_on_a_gpu_ends_the_process(
    impl: str, token: int, wrong: int, said: str
) -> None:
    """In a process of its own: a device-side assertion leaves the CUDA context unusable.

    The host of the kernels must not wait for it; eager's waits anyway, to find rows to rescue.
    """
    command = [sys.executable, "-c", WRONG_LABEL_ON_A_GPU, impl, str(token), str(wrong)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout.strip() == ("enqueued" if impl == "triton" else ""), done.stderr[-2000:]
    assert "device-side assert" in done.stderr
    assert said in done.stderr
