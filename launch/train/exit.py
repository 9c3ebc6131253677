"""A rank does not outlive the torchrun that started it."""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_torchrun() -> None:
    """Have the kernel kill this rank once its torchrun is gone; a killed torchrun ends no ranks.

    Only for ranks that torchrun started: those of another launcher may outlive it. The signal is
    SIGKILL, since a rank that waits in a collective handles no other. For the kernel the parent is
    the thread that started the rank, in torchrun the main thread.
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
