"""The Slurm batch script, with stand-ins for the commands that only a cluster has."""

import importlib.util
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "configs" / "slurm" / "train.sbatch"
# srun leaves out its own options and runs the rest; torchrun notes its arguments, and runs until
# a requeue is asked for if it is to be requeued.
STAND_INS = {
    "scontrol": 'echo "$*" >> "$NOTES/scontrol"; [ "$1" = show ] && printf "n1\\nn2\\nn3\\n"; true',
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "torchrun": 'printf "%s\\n" "$@" > "$NOTES/new"; mv "$NOTES/new" "$NOTES/torchrun"\n'
    'while [ "$REQUEUED" ] && ! grep -qs requeue "$NOTES/scontrol"; do sleep 0.02; done\n'
    'exit "${STATUS:-0}"',
}


def start(folder: Path, *args: str, **environment: str) -> subprocess.Popen[str]:
    commands = folder / "bin"
    commands.mkdir()
    for name, body in STAND_INS.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "123456", "SLURM_NNODES": "3"}
    slurm |= {"SLURM_JOB_NODELIST": "n[1-3]", "NOTES": str(folder)}
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(SCRIPT), *args], env={"PATH": path, **slurm, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def torchrun_options(folder: Path, *args: str, **environment: str) -> dict[str, str]:
    process = start(folder, *args, **environment)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    arguments = (folder / "torchrun").read_text().splitlines()
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def test_options_for_slurm_come_before_any_command():
    lines = SCRIPT.read_text().splitlines()
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    first_command = next(i for i, line in enumerate(lines) if re.match(r"[^#\s]", line))
    assert lines[0] == "#!/bin/bash" and directives[-1] < first_command
    assert "#SBATCH --ntasks-per-node=1" in lines and "#SBATCH --requeue" in lines


def test_it_names_files_that_exist_and_all_nodes_meet_on_the_first(tmp_path):
    options = torchrun_options(tmp_path)
    assert importlib.util.find_spec(options.pop("-m")) is not None
    named = re.findall(r"(?:configs|docs)/[\w./-]+", SCRIPT.read_text())
    assert named and all((ROOT / name).is_file() for name in [*named, options.pop("--config")])
    assert options == {
        "--nnodes": "3",
        "--nproc-per-node": "gpu",
        "--rdzv-id": "123456.0",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "n1:23456",
        "--max-restarts": "3",
    }


def test_arguments_reach_the_run_and_a_requeued_job_meets_anew(tmp_path):
    options = torchrun_options(tmp_path, "a b.yaml", "--steps", "7", SLURM_RESTART_COUNT="2")
    assert list(options.items())[-2:] == [("--config", "a b.yaml"), ("--steps", "7")]
    assert options["--rdzv-id"] == "123456.2"


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("warned", [True, False])
def test_before_the_time_limit_it_requeues_and_waits(tmp_path, status, warned):
    process = start(tmp_path, STATUS=str(status), REQUEUED="yes" if warned else "")
    while warned and not (tmp_path / "torchrun").exists():
        assert process.poll() is None
        time.sleep(0.01)
    if warned:
        process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate()
    assert process.returncode == status, output
    assert ("requeue 123456" in (tmp_path / "scontrol").read_text().splitlines()) == warned
