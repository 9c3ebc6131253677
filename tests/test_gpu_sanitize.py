"""tests/gpu_sanitize.py by itself, and under NVIDIA's compute-sanitizer where that is installed."""

import shutil
import subprocess
import sys

import pytest

from tests import gpu_sanitize
from tests.devices import CUDA, on_cuda
from tests.problems import interpreted
from tests.processes import ROOT, environment

FOUND = 9  # exit status of the sanitizer if it found something
TIMEOUT_S = 170  # the sanitizer makes the start of PyTorch slow, too
SCRIPT = ["-m", "tests.gpu_sanitize"]
ALL = len(gpu_sanitize.CASES)


def sanitize(tool: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run Python under ``tool``; skips without it, or where it does not support the device."""
    name = "compute-sanitizer"
    path = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if path is None:
        pytest.skip("needs compute-sanitizer on PATH or in /usr/local/cuda/bin")
    command = [path, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5"]
    # Ours alone: the compilers that Triton starts are not what is examined.
    command += ["--target-processes", "application-only", sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S,
        env={**environment(), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this device")
    return done


@pytest.mark.parametrize(("device", "impl", "cases"), [
    ("cpu", "eager", ALL),
    pytest.param("cpu", "triton", 2, marks=interpreted),
    pytest.param("cuda", "triton", ALL, marks=CUDA.marks),
])  # fmt: skip
def test_every_case_is_within_its_budget(device, impl, cases, monkeypatch, capsys):
    options = ["--device", device, "--impl", impl, "--cases", str(cases)]
    monkeypatch.setattr(sys, "argv", ["gpu_sanitize", *options])
    gpu_sanitize.main()
    assert capsys.readouterr().out == f"{cases} cases within their budgets\nok\n"


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
    done = sanitize("memcheck", ["-c", OUT_OF_BOUNDS])
    assert done.returncode != 0
    assert "Invalid __global__ read" in done.stdout, (done.stdout + done.stderr)[-2000:]
