"""The ranks of one host, started by torchrun's agent in this process, without its reports.

A rank that fails prints why, in one line or with its traceback. torchrun's command would add a page
for each failed rank, and its own traceback.
"""

import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def start_ranks(ranks: int, program: list[str]) -> int:
    """Run ``program`` on ``ranks`` ranks; return the exit status of the first that failed, or 0.

    Args:
        program: what comes after torchrun's own options, such as ``-m`` and a module.
    """
    logging.disable(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun sets, and says so
    try:
        torchrun(["--standalone", "--nproc-per-node", str(ranks), *program])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        number = signal.Signals(-failure.exitcode)
        print(f"error: rank {rank} was killed by {number.name}", file=sys.stderr)
        return 128 + number
    except SignalException as error:  # sent to this process; the ranks got SIGTERM and have ended
        return 128 + error.sigval
    return 0
