"""Check linear_cross_entropy on several GPUs of one host over NCCL, one process a GPU:

    torchrun --standalone --nproc-per-node 4 -m tests.gpu_parallel
    torchrun --standalone --nproc-per-node 2 -m tests.gpu_parallel --device cpu   # over gloo

Each check runs on all ranks at once (see parallel_checks.py and its neighbours). Ranks tell each
other what they found in a gloo group of their own; one line per check is printed, with every rank's
findings below it. The exit status is 1 if there are any.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests import parallel_best_checks, parallel_checks, parallel_device_checks
from tests.parallel_checks import Ranks
from tests.parallel_problem import small_chunks

Check = Callable[[Ranks], Iterator[str]]
CHECKS: dict[str, Check] = {
    # First: the memory that graphs may replay stays, and would count.
    "memory": parallel_device_checks.memory,
    "gradients": parallel_checks.gradients_against_fp64,
    "bits": parallel_checks.equal_bits,
    "streams": parallel_device_checks.other_streams,
    "devices": parallel_device_checks.another_device,
    "graphs": parallel_device_checks.captured,
    "filtered": parallel_checks.filtered_and_counted,
    "scores": parallel_checks.scores,
    "divergences": parallel_checks.best_and_divergences,
    "best_ids": parallel_best_checks.best_ids,
    "empty": parallel_checks.nothing_to_compute,
    "subgroups": parallel_checks.subgroups,
    "heads": parallel_checks.several_heads,
    "checkpointing": parallel_checks.activation_checkpointing,
    "compile": parallel_checks.under_compile,
    "host": parallel_device_checks.no_waiting_host,
    "collectives": parallel_checks.without_peer_copies,
    "first_call": parallel_checks.ranks_that_disagree,
}
# On a CPU test_compiled_on_ranks.py and test_verify.py have four of them.
GPU_ONLY = ("devices", "host", "collectives", "compile", "filtered", "scores", "divergences")
# What one hardware queue for all streams could reorder or let hang: copies beside other work.
BESIDE_OTHER_WORK = ("bits", "streams", "graphs", "subgroups", "heads")


class Finding(NamedTuple):
    """What one rank found in one check. ``raised`` names an exception's type."""

    messages: list[str]
    raised: str = ""


def run_check(check: Check, ranks: Ranks) -> Finding:
    """Run a check to its end, or to what it raises. On a CPU, problems and plans are small."""
    messages: list[str] = []
    try:
        with nullcontext() if ranks.on_gpu else small_chunks():
            messages.extend(check(ranks))
        if ranks.on_gpu:
            torch.cuda.synchronize()
    except Exception as error:
        text = traceback.format_exc().rstrip()
        # At once: if the other ranks wait for this one now, there may be no later.
        print(f"rank {ranks.rank} raised {text}", file=sys.stderr, flush=True)
        return Finding([*messages, text], type(error).__name__)
    return Finding(messages)


def run_checks(names: list[str], ranks: Ranks, group: dist.ProcessGroup) -> bool:
    """Run checks, tell each other over ``group`` what came of them, print it; is all well?

    Stops where some ranks raised and others did not: they are no longer in step.
    """
    failed: list[str] = []
    say = partial(print, sep="\n", flush=True) if ranks.rank == 0 else lambda *_: None
    for i, name in enumerate(names):
        say(f"{name}: running")
        started = time.monotonic()
        found = [Finding([])] * ranks.P
        dist.all_gather_object(found, run_check(CHECKS[name], ranks), group=group)
        lines = [f"  rank {rank}: {x}" for rank, one in enumerate(found) for x in one.messages]
        verdict = "FAILED" if lines else "ok"
        say(f"{name}: {verdict} ({time.monotonic() - started:.1f} s)", *lines)
        if lines:
            failed.append(name)
        if len({one.raised for one in found}) > 1:
            failed += names[i + 1 :]
            break
    say(f"{len(names) - len(failed)} of {len(names)} checks passed on {ranks.P} ranks")
    say(f"failed or not run: {', '.join(failed)}" if failed else "ok")
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_parallel")
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--checks", nargs="+", choices=list(CHECKS), help="by default all")
    add("--timeout-s", type=float, default=120.0, help="of a collective")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    names = arguments.checks or [name for name in CHECKS if on_gpu or name not in GPU_ONLY]
    device = torch.device(arguments.device)
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    timeout = timedelta(seconds=arguments.timeout_s)
    backend, device_id = ("nccl", device) if on_gpu else ("gloo", None)
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    assert dist.group.WORLD is not None
    # A rank that waits for another in a collective gives up before those who wait for it here.
    group = dist.new_group(backend="gloo", timeout=2 * timeout)
    passed = run_checks(names, Ranks(dist.group.WORLD, device), group)
    if passed:
        dist.destroy_process_group()
        return 0
    # Out of step, the ranks might wait for each other while they leave.
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
