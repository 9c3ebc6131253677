"""Run every test that this machine can run:

    python -m tests                     # what `make test` does after lint
    python -m tests -k smoothing -x     # arguments of pytest, but not -m

Without a GPU this is one run of pytest. With GPUs two run side by side, one for the CPU's tests and
one for the GPUs' (tests/machine.py says why); tests of ranks with a GPU each come last, because
they are slow beside others. The exit status is 0 if all that ran succeeded.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.machine import missing

ROOT = Path(__file__).parent.parent
MOST_WORKERS = 8  # of the CPU's tests: one thread each; more do not help
WORKERS_OF_A_GPU = 14  # each has a CUDA context; Triton's compiler keeps a core of each busy
# Files stay whole because their simulated ranks are set up once for each. xdist would end with
# files of few tests, some of which take long.
WHOLE_FILES = ("--dist", "loadfile", "--no-loadscope-reorder")
PASSED = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}


def command(markers: str, workers: int, how: Sequence[str] = WHOLE_FILES) -> list[str]:
    """Return the command of one run of pytest, for tests with these markers if any."""
    found = [sys.executable, "-u", "-m", "pytest"]
    if workers and find_spec("xdist"):
        found += ["-n", str(workers), *how]
    if markers:
        found += ["-o", f"cache_dir=.pytest_cache/{markers.replace(' ', '_')}", "-m", markers]
    return found


def parts(gpus: int, cores: int) -> list[dict[str, list[str]]]:
    """Return the commands of the runs, by name; those of one dict go side by side."""
    of_cpu = min(cores, MOST_WORKERS)
    if not gpus:
        return [{"CPU": command("", of_cpu)}]
    workers = min(cores, WORKERS_OF_A_GPU * gpus)
    # With one GPU there are no ranks with one each: then these tests say what they miss.
    markers = "gpu and not alone" if gpus > 1 else "gpu"
    beside = {
        "CPU": command("not gpu", of_cpu),
        "GPU": command(markers, workers, ("--dist", "worksteal")),
    }
    # One test after the other, some of minutes: it shows which one runs, and what that says.
    alone = [*command("gpu and alone", 0), "-v", "-s"]
    return [beside, {"GPUs": alone}] if gpus > 1 else [beside]


def run_side_by_side(commands: dict[str, list[str]]) -> dict[str, tuple[int, str]]:
    """Return each command's exit status and last line; all lines are shown, behind its name."""
    processes = {
        name: subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name, command in commands.items()
    }

    def show(name: str) -> tuple[int, str]:
        last = ""
        for line in processes[name].stdout or ():
            print(f"{name:4} | {line}", end="", flush=True)
            last = line.strip() or last
        return processes[name].wait(), last

    with ThreadPoolExecutor() as pool:
        try:
            return dict(zip(commands, pool.map(show, commands), strict=True))
        finally:  # else the pool would wait for the processes
            for process in processes.values():
                process.terminate()


def main(arguments: list[str], gpus: int) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    if not find_spec("xdist"):
        print(f"tests run in one process; a second one {missing('xdist')}", flush=True)
    stages = parts(gpus, len(os.sched_getaffinity(0)))
    if not gpus:
        return subprocess.run([*stages[0]["CPU"], *arguments], cwd=ROOT).returncode
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the parts, too
    ended: dict[str, tuple[int, str]] = {}
    for stage in stages:
        ended |= run_side_by_side({name: [*one, *arguments] for name, one in stage.items()})
    for name, (_, line) in ended.items():
        print(f"{name:4} | {line.strip('= ')}")
    statuses = {status for status, _ in ended.values()}
    return max(statuses - PASSED) if statuses - PASSED else min(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], torch.cuda.device_count()))
