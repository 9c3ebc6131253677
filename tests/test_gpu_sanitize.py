"""tests/gpu_sanitize.py by itself, and under NVIDIA's compute-sanitizer where that is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gpu_sanitize
from tests.problems import interpreted
from tests.test_gpu_oracle import each_device, on_cuda

ROOT = Path(__file__).parents[1]
FOUND = 9  # exit status of the sanitizer if it found something
TIMEOUT_S = 170  # the sanitizer makes the start of PyTorch slow, too
SCRIPT = ["-m", "tests.gpu_sanitize"]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def sanitizer() -> str:
    """Path of compute-sanitizer; skips the test without it."""
    path = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if path is None:
        pytest.skip("needs compute-sanitizer on PATH or in /usr/local/cuda/bin")
    return path


def sanitize(tool: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run Python under ``tool``; skips where the sanitizer does not support the device."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5"]
    # Ours alone: the compilers that Triton starts are not what is examined.
    options += ["--target-processes", "application-only"]
    done = run(
        [sanitizer(), *options, sys.executable, *arguments], PYTORCH_NO_CUDA_MEMORY_CACHING="1"
    )
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this device")
    return done


@each_device
def test_every_case_is_within_its_budget(device):
    done = run([sys.executable, *SCRIPT, "--device", device], TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith(f"{len(gpu_sanitize.CASES)} cases within their budgets\nok\n")


@interpreted
def test_interpreted_kernels_pass_the_first_two_cases(monkeypatch, capsys):
    options = ["--device", "cpu", "--impl", "triton", "--cases", "2"]
    monkeypatch.setattr(sys, "argv", ["gpu_sanitize", *options])
    gpu_sanitize.main()
    assert capsys.readouterr().out == "2 cases within their budgets\nok\n"


@pytest.mark.parametrize("case", gpu_sanitize.CASES, ids=range(len(gpu_sanitize.CASES)))
def test_a_wrong_result_is_noticed(case, monkeypatch):
    """Half of the gradient, from every call."""
    for name in ("linear_cross_entropy", "linear_cross_entropy_with_metrics"):
        real = getattr(gpu_sanitize, name)

        def halved(hidden, weight, labels, *, real=real, **options):
            return real(hidden, 0.5 * weight + 0.5 * weight.detach(), labels, **options)

        monkeypatch.setattr(gpu_sanitize, name, halved)
    with pytest.raises(AssertionError, match=r"dweight: error .* exceeds"):
        gpu_sanitize.check(case, "cpu", None)


@on_cuda
@pytest.mark.parametrize(("tool", "cases"), [("memcheck", 5), ("racecheck", 2)])
def test_the_sanitizer_finds_nothing(tool, cases, device):
    done = sanitize(tool, [*SCRIPT, "--device", device, "--cases", str(cases)])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert f"{cases} cases within their budgets\nok\n" in done.stdout
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout, done.stdout[-2000:]


OUT_OF_BOUNDS = """
import torch
x = torch.zeros(4, device="cuda")
class Longer:
    __cuda_array_interface__ = {
        "shape": (1 << 12,), "typestr": "<f4", "data": (x.data_ptr(), False), "version": 2,
    }
print(torch.as_tensor(Longer(), device="cuda").sum().item())
"""


@on_cuda
def test_the_sanitizer_finds_a_read_beyond_a_tensor(device):
    """Else that it found nothing would mean nothing."""
    done = sanitize("memcheck", ["-c", OUT_OF_BOUNDS])
    assert done.returncode != 0
    assert "Invalid __global__ read" in done.stdout, (done.stdout + done.stderr)[-2000:]


def test_without_a_sanitizer_there_is_a_reason(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(pytest.skip.Exception, match="needs compute-sanitizer on PATH"):
        sanitizer()
