"""Peer memory over the real CUDA driver on ONE GPU, which two processes share:

    python -m tests.gpu_peers_one_device                  # all cases, about three minutes
    python -m tests.gpu_peers_one_device graph hang       # some

Each case runs in two fresh processes, whose ranks meet over gloo and map each other's memory
(PyTorch lets them with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1). Streams wait for flags, graphs
are captured and replayed as on two GPUs; only slower, since the GPU runs one process at a time. A
line is printed for each case, with what each rank found below it if that is not nothing. The exit
status is 1 if a case failed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu_peers_cases import CASES, LIMIT_S, SHORT_S, P, Rank, join

CASE_S = 300  # a case's limit
ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}


def run_rank(name: str, rank: int) -> int:
    """Run a case as one rank; its findings go to stdout, each behind "found: "."""
    torch.cuda.set_device(0)
    join(rank, os.environ["ONE_DEVICE_STORE"])
    assert dist.group.WORLD is not None
    case = CASES[name]
    me = Rank(dist.group.WORLD, torch.device("cuda", 0), SHORT_S if case.aborts else LIMIT_S)
    found = []
    try:
        found += list(case.run(me))
        torch.cuda.synchronize()
    except BaseException:
        found.append(traceback.format_exc().rstrip())
    for line in found:
        print("found: " + line.replace("\n", "\n  "), flush=True)
    if not found:
        dist.barrier()
    sys.stdout.flush()
    os._exit(bool(found))  # whatever the GPU still waits for


def run_case(name: str) -> list[str]:
    """Run a case in two processes; return what was wrong."""
    case, outputs = CASES[name], []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **ENVIRONMENT, "ONE_DEVICE_STORE": f"{folder}/store"}
        command = [sys.executable, "-m", "tests.gpu_peers_one_device", name, "--rank"]
        logs = [open(f"{folder}/{rank}", "w+") for rank in range(P)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)], cwd=ROOT, env=environment, stdout=log, stderr=log
            )
            for rank, log in enumerate(logs)
        ]
        deadline, late = time.monotonic() + CASE_S, set()
        for rank, process in enumerate(ranks):
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.add(rank)
                process.kill()
                process.wait()
        for log in logs:
            log.seek(0)
            outputs.append(log.read())
            log.close()
    wrong = [f"rank {rank} did not end within {CASE_S} s" for rank in sorted(late)]
    for rank, process in enumerate(ranks):
        right = -signal.SIGABRT if case.aborts and rank == 0 else 0
        if process.returncode != right and rank not in late:
            wrong.append(f"rank {rank} ended with {process.returncode}, not {right}")
    if case.aborts and case.aborts not in outputs[0]:
        wrong.append(f"rank 0 did not say: {case.aborts}")
    if wrong or any("found: " in output for output in outputs):
        for rank, output in enumerate(outputs):
            wrong += [f"rank {rank} | {line}" for line in output.splitlines()[-40:]]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    parser.add_argument("--rank", type=int)
    arguments = parser.parse_args()
    names = arguments.cases or list(CASES)
    if arguments.rank is not None:
        return run_rank(names[0], arguments.rank)
    failed = []
    for name in names:
        print(f"{name}: {' '.join((CASES[name].run.__doc__ or '').split())}", flush=True)
        started = time.monotonic()
        wrong = run_case(name)
        print(f"  {'FAILED' if wrong else 'ok'} ({time.monotonic() - started:.1f} s)", flush=True)
        for line in wrong:
            print(f"    {line}", flush=True)
        if wrong:
            failed.append(name)
    print(f"{len(names) - len(failed)} of {len(names)} cases passed", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
