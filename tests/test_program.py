"""How programs of launch/ end: what reaches the screen, torchrun's error file and the exit code."""

import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flce_dist.launch import __main__ as listing
from flce_dist.launch import about, program
from flce_dist.launch.process_group import device_type_of
from flce_dist.launch.program import EXTRAS, MODULES, RunError, run_program
from flce_dist.launch.train.config import HeadConfig, RunConfig
from flce_dist.launch.train.ranks import choose_device
from flce_dist.launch.yaml_config import ConfigError
from flce_dist.testing import RankPool
from tests import machine
from tests.processes import started


def raising(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


def ended(main: Callable[[], int], rank: int, file: Path, monkeypatch: Any) -> tuple[Any, str]:
    """Run as that rank; return the exit code and what its error file shows in torchrun's report."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit) as exit:
        run_program(main)
    if not file.exists():
        return exit.value.code, ""
    return exit.value.code, json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]


@pytest.mark.parametrize(("variables", "message"), [
    ({"RANK": "1"}, "LOCAL_RANK must be a number, got nothing; torchrun sets RANK, WORLD_SIZE"),
    ({"WORLD_SIZE": "2"}, "LOCAL_RANK must be a number, got nothing"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK must be a number, got 'x'"),
])  # fmt: skip
def test_half_of_a_launchers_environment_is_named(variables, message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert program.launcher_number("LOCAL_RANK", alone=0) == 0
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=message):
        program.launcher_number("LOCAL_RANK", alone=0)


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_host_with_too_few_gpus_for_its_ranks_is_named_on_each(asked, monkeypatch):
    """Else those without one fail at their device, and others wait for them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank, ranks in ((0, 2), (1, 2), (0, 3), (2, 3)):
        for name, value in (("RANK", 8), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", ranks)):
            monkeypatch.setenv(name, str(value))
        config = RunConfig(device=asked)
        assert device_type_of("cpu") == "cpu"
        if ranks == 2:
            assert device_type_of(asked) == "cuda"
            assert choose_device(config) == torch.device("cuda", rank)
            continue
        needs = f"^device={asked} needs a GPU for each of the 3 ranks here, found 2; start fewer"
        with pytest.raises(ConfigError, match=needs):
            choose_device(config)
        with pytest.raises(ConfigError, match=needs):
            device_type_of(asked)


def test_ours_on_a_gpu_is_refused_without_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(RunConfig()) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"^head\.impl=triton needs GPUs; on CPU use eager"):
        choose_device(RunConfig(head=HeadConfig(impl="triton")))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_commit_is_of_our_own_checkout(tmp_path):
    """A wheel may be installed below a checkout of something else."""
    file = tmp_path / "site-packages" / "about.py"
    file.parent.mkdir()
    file.touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "a"], check=True)
    assert about._commit(file) is None
    subprocess.run([*git, "add", str(file)], check=True)
    dirty = about._commit(file)
    assert dirty is not None and dirty.endswith("-dirty")
    subprocess.run([*git, "commit", "--quiet", "--message", "b"], check=True)
    clean = about._commit(file)
    assert clean is not None and re.fullmatch("[0-9a-f]{7,}", clean)
    assert about._commit(tmp_path / "nowhere" / "about.py") is None


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(program.time, "sleep", found.append)
    monkeypatch.setattr(program.signal, "signal", lambda *args: None)
    return found


@pytest.mark.parametrize("rank", [0, 3])
def test_an_error_that_explains_itself_is_one_line(rank, tmp_path, monkeypatch, capsys, waits):
    """Rank 0 speaks at once; another only if nobody ended it because of rank 0's exit."""
    main = raising(RunError("disk of\nruns/x is full"))
    line = f"error: {'rank 3: ' if rank else ''}disk of runs/x is full"
    assert ended(main, rank, tmp_path / "error.json", monkeypatch) == (2, line)
    assert capsys.readouterr() == ("", line + "\n")
    assert waits == ([program.WAIT_S] if rank else [])


def test_a_bug_shows_its_traceback(tmp_path, monkeypatch, capsys):
    error = ModuleNotFoundError("x", name="of_no_extra")
    found = ended(raising(error), 1, tmp_path / "error.json", monkeypatch)
    assert found == (1, "rank 1: ModuleNotFoundError: x")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1] == "ModuleNotFoundError: x"


@pytest.mark.parametrize("main, status", [
    (lambda: 0, 0),
    (lambda: 1, 1),
    (raising(KeyboardInterrupt()), 130),
    (raising(SystemExit(143)), 143),
    (raising(SystemExit(2)), 2),  # of a command line, explained before
])  # fmt: skip
def test_other_ends_say_nothing(main, status, tmp_path, monkeypatch, capsys, waits):
    assert ended(main, 1, tmp_path / "error.json", monkeypatch) == (status, "")
    assert capsys.readouterr() == ("", "")
    assert waits == ([program.WAIT_S] if status == 2 else [])


def rank_fails(group: dist.ProcessGroup) -> tuple[str, Any]:
    """A bug on each rank, the last one first; return what was printed, and the exit status."""
    os.environ["RANK"] = str(group.rank())
    screen = io.StringIO()

    def main() -> int:
        for _ in range(group.size() - 1 - group.rank()):
            dist.barrier()
        raise RuntimeError("a bug\nin lines")

    with (
        mock.patch.object(program.os, "_exit", sys.exit),
        contextlib.redirect_stderr(screen),
        pytest.raises(SystemExit) as exit,
    ):
        run_program(main)
    for _ in range(group.rank()):
        dist.barrier()
    return screen.getvalue(), exit.value.code


def test_the_rank_that_failed_first_shows_its_traceback():
    with RankPool(3) as ranks:
        first, *others = reversed(ranks.run(rank_fails))
    assert first[0].startswith("Traceback") and first[1] == 1
    for rank, (text, status) in zip((1, 0), others, strict=True):
        assert (text, status) == (f"rank {rank}: RuntimeError: a bug in lines\n", 1)


LAUNCH = Path(__file__).parent.parent / "launch"
PROGRAMS = sorted(path.parent.name for path in LAUNCH.glob("*/__main__.py"))

BLOCKED = """
import os, runpy, sys
import torch.distributed.tensor, flce_dist.filtered, flce_dist.testing  # once for all programs
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
class Blocked:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
for run in sys.argv[1:]:
    blocked, name, *arguments = run.split()
    if os.fork() == 0:
        blocked = blocked.split(",")
        mine = "flce_dist.launch", "flce_dist.megatron"
        for module in list(sys.modules):
            if module.split(".")[0] in blocked or module.startswith(mine):
                del sys.modules[module]
        sys.meta_path.insert(0, Blocked)
        sys.argv[1:] = arguments
        try:
            try:
                runpy.run_module(f"flce_dist.launch.{name}", run_name="__main__", alter_sys=True)
            except Exception:
                sys.excepthook(*sys.exc_info())
        except SystemExit as end:
            os._exit(end.code)  # what the libraries do at the end takes as long as all this
    status = os.waitstatus_to_exitcode(os.wait()[1])
    print(name, status, end="\\0", file=sys.stderr, flush=True)
"""


def test_a_program_without_its_packages_names_the_extra(tmp_path):
    """In one line, also for a package that it imports later; and it needs no other extra."""
    extras = {name: EXTRAS.get(name, "train") for name in PROGRAMS}
    runs = [f"{','.join(MODULES['train'])} {name} --help" for name in PROGRAMS]
    has_all = all(map(importlib.util.find_spec, MODULES["train"] - {"megatron"}))
    if has_all:
        others = {name: MODULES["train"] - MODULES[extra] for name, extra in EXTRAS.items()}
        runs += [f"{','.join(modules)} {name} --help" for name, modules in others.items()]
    with started([sys.executable, "-c", BLOCKED, *runs], tmp_path, forks=True) as run:
        (status,), (output,) = run.finish()
    assert status == 0, output
    found = iter([part.splitlines() for part in output.split("\0")[:-1]])
    for name, extra in extras.items():
        line, *end = next(found)
        needs = rf"flce_dist\.launch\.{name} needs \w+: pip install 'flce_dist\[{extra}\]'"
        assert re.fullmatch(f"error: {needs}", line) and end == [f"{name} 2"], [line, *end]
    assert list(found) == [[f"{name} 0"] for name in EXTRAS if has_all]


def test_extras_are_those_of_pyproject():
    """For the messages of programs, and for what tests say about packages that they miss."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer")
    project = tomllib.loads((LAUNCH.parent / "pyproject.toml").read_text())["project"]

    def packages(extra: str) -> set[str]:
        found = set()
        for line in project["optional-dependencies"][extra]:
            name, others = re.findall(r"^([\w-]+)(?:\[(.*)\])?", line)[0]
            found |= set().union(*map(packages, others.split(","))) if others else {name}
        return found

    names = {"megatron-core": "megatron", "pyyaml": "yaml", "pytest-xdist": "xdist"}

    def modules(extra: str) -> set[str]:
        return {names.get(package, package.replace("-", "_")) for package in packages(extra)}

    assert all(modules(extra) == expected for extra, expected in MODULES.items())
    assert modules("test") >= {*machine.TEST}
    # Ranks gather objects through it, in launch.verify for example.
    assert any(line.startswith("numpy") for line in project["dependencies"])
    assert set(EXTRAS) <= {path.name for path in LAUNCH.iterdir()}


def test_programs_are_listed_by_their_own_descriptions(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch"])
    assert listing.main() == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == sorted([*PROGRAMS, "train.heads"])
    for line in lines:
        name = line.split()[0].replace(".", "/")
        files = LAUNCH / name / "__main__.py", LAUNCH / f"{name}.py"
        (path,) = filter(Path.exists, files)
        assert path.read_text().startswith('"""' + line[15:]) and line.endswith(".")
    monkeypatch.setattr(sys, "argv", ["launch", "train", "--help"])
    with pytest.raises(RunError, match=r"by its own name, .*, got train --help$"):
        listing.main()


UNREAD = """
import os, sys
from flce_dist.launch.program import run_program
sys.stdout = open(1, "w", closefd=False)  # with a buffer
def main():
    if kind == "bug":
        os.write(writer, b"x")
    print("line\\n" * (10**6 if kind == "much" else 1))
    return sys.exit(0) if kind == "help" else 0
for kind in ("much", "little", "help", "bug"):
    reader, writer = os.pipe()
    os.close(reader)
    if os.fork() == 0:
        if kind != "bug":
            os.dup2(writer, 1)
        run_program(main)
    print(kind, os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)
"""


def test_a_reader_that_is_gone_ends_a_program_without_a_word(tmp_path):
    with started([sys.executable, "-c", UNREAD], tmp_path, forks=True) as run:
        statuses, (output,) = run.finish()
    lines = output.splitlines()
    assert statuses == [0] and lines[:3] == ["much 141", "little 141", "help 141"], output
    assert "BrokenPipeError: [Errno 32] Broken pipe" in lines and lines[-1] == "bug 1"
