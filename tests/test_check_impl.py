"""Devices that impl="triton" refuses, and wrong labels on a GPU."""

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flce_dist.op import checks


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


def test_triton_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300 is a "cuda" device of capability 9.4, and no Hopper."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    monkeypatch.setattr(torch.version, "hip", "6.4.43484")
    checks._capability.cache_clear()
    hidden: Any = SimpleNamespace(
        dtype=torch.bfloat16, is_cuda=True, device=torch.device("cuda", 0)
    )
    with pytest.raises(NotImplementedError, match=r"ROCm 6\.4\.43484: use impl='eager'$"):
        checks.check_impl("triton", hidden)
    checks.check_impl("eager", hidden)
    checks._capability.cache_clear()


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
