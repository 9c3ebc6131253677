"""Bare gloo ranks, one of which dies or falls silent: the others raise, and nobody waits for ever.

``test_train.py`` has the same for ranks that torchrun watches.
"""

import os
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flce_dist import linear_cross_entropy
from tests.processes import LAST_RESORT_S, forked

P = 3
# Who receives from a killed rank notices at once. Who had sent to it before that, and waits for
# one that noticed, ends at the limit of the group.
LIMIT_S = {"killed": 20, "silent": 1}


def share(pipe: Connection, rank: int, store: Path, fault: str, where: str) -> None:
    """One rank's forward and backward; the last rank is struck by ``fault`` before ``where``."""
    torch.set_num_threads(1)
    of_all, timeout = dist.FileStore(str(store), P), timedelta(seconds=LAST_RESORT_S)
    dist.init_process_group("gloo", store=of_all, rank=rank, world_size=P, timeout=timeout)
    hidden, weight = torch.zeros(8, 4, requires_grad=True), torch.zeros(5, 4, requires_grad=True)

    def strike(name: str) -> None:
        """All ranks come here together."""
        dist.barrier()
        if name != where:
            return
        limit = timedelta(seconds=LIMIT_S[fault])
        dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
        if rank == P - 1:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()

    error = ""
    try:
        strike("forward")
        loss = linear_cross_entropy(hidden, weight, torch.arange(8), tp_group=dist.group.WORLD)
        strike("backward")
        loss.backward()
    except RuntimeError as raised:
        error = str(raised)
    pipe.send(error)
    signal.pause()  # what this rank raised, not its end, is what the others must not wait for


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside idle threads
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("fault", "said"), [("killed", "Connection "), ("silent", "1000ms")])
def test_a_rank_that_is_gone_makes_the_others_raise(
    fault: str, said: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # no network is needed
    ranks = [forked(share, rank, tmp_path / "store", fault, where) for rank in range(P)]
    try:
        errors = []
        for rank, (_, pipe) in enumerate(ranks[:-1]):
            assert pipe.poll(LAST_RESORT_S), f"rank {rank} waits for ever"
            errors.append(pipe.recv())
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
    assert all(errors), "a rank went on without another's share"
    assert any(said in error for error in errors), errors
