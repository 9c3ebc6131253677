"""The ranks of a run: how they start and meet, and that none is left over."""

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from flce_dist.launch.process_group import device_type_of, quiet_megatron
from flce_dist.launch.program import launcher_number
from flce_dist.launch.train.config import RunConfig
from flce_dist.launch.yaml_config import require

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

NO_FILE = "<N/A>"  # torch's ProcessFailure, of a rank that has written none
PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process gets when its parent is gone
# What a rank runs first: seconds before it has imported torch its launcher may be killed.
RANK = f"""\
import ctypes, os, runpy, signal, sys
launcher, module = int(sys.argv[1]), sys.argv[2]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGKILL)
if os.getppid() != launcher:
    os._exit(128 + signal.SIGKILL)
sys.argv[:3] = [module]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def start_ranks(ranks: int, module: str, arguments: list[str]) -> int:
    """Run ``module`` on ``ranks`` ranks of this host; return the status of the first that failed.

    torchrun's agent runs in this process, without its reports, as a rank that fails prints why. The
    ranks end with this process, however it ends.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.disable(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun sets, and says so
    rank = [sys.executable, "-u", "-c", RANK, str(os.getpid()), module, *arguments]
    try:
        torchrun(["--standalone", "--nproc-per-node", str(ranks), "--no-python", *rank])
    except ChildFailedError as error:
        return _status_of(error.failures)
    except SignalException as error:  # sent to this process; the ranks got SIGTERM and have ended
        return 128 + error.sigval
    return 0


def _status_of(failures: "dict[int, ProcessFailure]") -> int:
    """Return the status of the rank that failed first; print what it cannot have said itself.

    A rank that was killed comes before others, which only miss it. The launcher ends those that
    are left by SIGTERM.
    """
    of_launcher = (-signal.SIGTERM,)
    killed = [x for x in failures.values() if x.exitcode < 0 and x.exitcode not in of_launcher]
    failure = min(killed or failures.values(), key=lambda x: x.timestamp)
    rank = failure.local_rank
    if failure.exitcode < 0:
        number = signal.Signals(-failure.exitcode)
        say(f"error: rank {rank} was killed by {number.name}")
        return 128 + number
    if failure.error_file == NO_FILE:  # a rank that explains itself does it there, too
        say(f"error: rank {rank} ended with status {failure.exitcode} and did not say why")
    return failure.exitcode


def end_with_torchrun() -> None:
    """Have the kernel kill this rank once the torchrun that started it is gone.

    Only for ranks of torchrun: those of another launcher may outlive it. The signal is SIGKILL,
    since a rank that waits in a collective handles no other.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if is_orphan(os.getppid()):  # torchrun was gone before that call
        os._exit(128 + signal.SIGKILL)


def is_orphan(parent: int, proc: Path = Path("/proc")) -> bool:
    """Whether ``parent`` is the init process, which adopts orphans.

    In a container torchrun itself may be process 1; then it is a Python process.
    """
    if parent != 1:
        return False
    try:
        command = (proc / "1" / "cmdline").read_bytes()
    except OSError:  # hidden, so it is another user's
        return True
    return b"python" not in command and b"torchrun" not in command


def choose_device(config: RunConfig) -> torch.device:
    """Return the device of this rank; ``ConfigError`` if there is no GPU that it needs."""
    kind = device_type_of(config.device)
    needs = "head.impl=triton needs GPUs; on CPU use eager or leave it out"
    require(kind == "cuda" or config.head.impl != "triton", needs)
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", launcher_number("LOCAL_RANK"))


def join_ranks(device: torch.device) -> None:
    """Make the default process group."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Objects (what ranks decide together) go over gloo, tensors over NCCL.
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    quiet_megatron()


def say(message: str) -> None:
    """Print a line beside what the run prints; for one rank."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def said(task: str) -> Iterator[None]:
    """Let rank 0 print the task before it starts, and afterwards how long it took."""
    start = time.perf_counter()
    tell = say if dist.get_rank() == 0 else lambda message: None
    tell(f"{task} ...")
    yield
    tell(f"{task}: {time.perf_counter() - start:.1f} s")
