"""How `python -m tests` divides the tests, what a run may see, and what missing packages become."""

import os
import sys
from collections import defaultdict

import pytest

from tests import __main__ as program
from tests import machine
from tests.processes import started


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
@pytest.mark.parametrize("marks", [set(), {"gpu"}, {"gpu", "alone"}], ids=["cpu", "gpu", "alone"])
def test_each_test_belongs_to_one_part(marks, gpus):
    """And that part sees GPUs if and only if the test is for them."""
    has = defaultdict(bool, dict.fromkeys(marks, True))
    chosen = []
    for name, command in (part for stage in program.parts(gpus, 16) for part in stage.items()):
        pytest_options = command[command.index("pytest") :]
        markers = "True"
        if "-m" in pytest_options:
            markers = pytest_options[pytest_options.index("-m") + 1]
        if eval(markers, {"__builtins__": {}}, has):
            chosen.append(markers)
            workers = command[command.index("-n") + 1] if "-n" in command else 0
            assert int(workers) <= 16 and bool(workers) == (name != "GPUs")
    (markers,) = chosen
    assert machine.is_for_gpus(markers) == (bool(marks) and gpus > 0)


@pytest.mark.parametrize("visible", [None, "", "0,1,2", "GPU-a,GPU-b,GPU-c"])
def test_workers_begin_with_different_gpus(visible, monkeypatch):
    names = visible.split(",") if visible else ["0", "1", "2"]
    for worker in range(5):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        machine.begin_with_gpu(worker, 3)
        seen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        assert seen[0] == names[worker % 3] and sorted(seen) == names


def test_parts_run_side_by_side(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    ended = program.run_side_by_side({
        "CPU": ["sh", "-c", f"echo one > {tmp_path}/pipe; echo 3 passed"],
        "GPU": ["sh", "-c", f"cat {tmp_path}/pipe; echo 1 failed; exit 1"],
    })  # fmt: skip
    assert ended == {"CPU": (0, "3 passed"), "GPU": (1, "1 failed")}
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["CPU  | 3 passed", "GPU  | 1 failed", "GPU  | one"]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [((0, 0, 0), 0), ((0, 1, 0), 1), ((5, 0, 5), 0), ((5, 5, 5), 5), ((0, 0, -9), -9)],
)
def test_one_part_that_fails_fails_all(statuses, expected, monkeypatch):
    left = list(statuses)
    monkeypatch.setattr(
        program, "run_side_by_side", lambda parts: {name: (left.pop(0), "") for name in parts}
    )
    monkeypatch.setattr(program.signal, "signal", lambda *args: None)
    assert program.main([], 2) == expected
    assert left == []


PACKAGE = "no_such_module"
FILES = {
    "conftest.py": f"""
from tests import machine
machine.EXTRAS["{PACKAGE}"] = "bench"
""",
    "test_needs_it.py": f"import {PACKAGE}",
    "test_others.py": f"""
import os, pytest, torch

def test_imports_it():
    pytest.importorskip("{PACKAGE}")

def test_sees_no_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and os.environ["TRITON_INTERPRET"] == "1"

def test_imports_what_no_extra_has():
    import another_module

@pytest.mark.gpu(2)
def test_of_two_gpus():
    raise AssertionError
""",
}


def test_what_is_missing_is_one_line(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for name in [name for name in os.environ if name.startswith(("PYTEST_", "TRITON_INTERPRET"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest"]
    command += ["-p", "no:cacheprovider", "-ra", str(tmp_path)]
    with started(command, tmp_path / "logs", forks=True) as run:
        _, (output,) = run.finish()
    *summary, counts = output.partition("short test summary info")[2].splitlines()[1:]
    package, gpu, failed = summary
    assert package.startswith("SKIPPED [2] pyproject.toml: needs no_such_module, which pip insta")
    assert gpu.startswith("SKIPPED [1] ") and gpu.endswith(": needs 2 GPUs; only -m gpu sees GPUs")
    assert failed.startswith("FAILED ") and "::test_imports_what_no_extra_has" in failed
    assert "1 failed, 1 passed, 3 skipped" in counts
