"""Two torchrun agents on one machine, joined by a c10d rendezvous, stand for two nodes.

What runs under one agent must run, and give the same bits, under several: ranks are global, and
only ``LOCAL_RANK`` starts anew on each node. docs/multi_node.md tells how real nodes are started.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_training import TINY, descendants, kill, records

pytest.importorskip("tyro")
pytest.importorskip("rich")
pytestmark = pytest.mark.timeout(180)  # two agents and two ranks import for seconds each

ROOT = Path(__file__).parent.parent
SECONDS = 90


def one_node(*program: str) -> list[str]:
    """Return the command of two ranks under one agent."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", "2", "-m", *program]


def two_nodes(*program: str) -> list[str]:
    """Return the command of one of two agents; both are the same, as on a cluster."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    torchrun += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two-nodes"]
    torchrun += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    torchrun += ["--max-restarts", "3"]
    return [*torchrun, "-m", *program]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def started(command: list[str], nodes: int, logs: Path) -> Iterator[list[subprocess.Popen[Any]]]:
    """Start ``nodes`` agents, each with its output in ``logs``; none of them outlives the block."""
    logs.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # A new store for each start of the ranks: docs/multi_node.md says why.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    agents: list[subprocess.Popen[Any]] = []
    try:
        for node in range(nodes):
            with (logs / f"node{node}.log").open("w") as log:
                agents.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
                )
        yield agents
    finally:
        for agent in agents:
            kill(agent)


def run(command: list[str], nodes: int, logs: Path) -> tuple[list[int], list[str]]:
    """Run the agents to their end; return their exit statuses and outputs."""
    with started(command, nodes, logs) as agents:
        return statuses_of(agents, logs), outputs(logs)


def statuses_of(agents: list[subprocess.Popen[Any]], logs: Path) -> list[int]:
    deadline = time.monotonic() + SECONDS
    while any(agent.poll() is None for agent in agents):
        assert time.monotonic() < deadline, outputs(logs)
        time.sleep(0.05)
    return [agent.returncode for agent in agents]


def outputs(logs: Path) -> list[str]:
    return [path.read_text() for path in sorted(logs.glob("node*.log"))]


def verify(*args: str) -> list[str]:
    small = ["--device", "cpu", "--dtypes", "fp32", "--shapes", "8", "16", "64"]
    return two_nodes("flce_dist.launch.verify", *small, *args)


def test_verify_over_two_nodes(tmp_path: Path) -> None:
    report = tmp_path / "verify.json"
    statuses, texts = run(verify("--output", str(report)), 2, tmp_path)
    assert statuses == [0, 0], texts
    found = json.loads(report.read_text())
    assert found["passed"] and found["ranks"] == 2 and len(found["records"]) > 50
    printed = [re.search(r"PASS: (\d+) of \1 cases .* 2 x CPU", text) is not None for text in texts]
    assert sorted(printed) == [False, True], texts  # the agent of rank 0 alone


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the run under one agent."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("mistral_common")
    folder = tmp_path_factory.mktemp("reference")
    statuses, texts = run(one_node(*train(folder)), 1, folder / "logs")
    assert statuses == [0], texts
    return folder / "run"


def train(folder: Path) -> list[str]:
    (folder / "tiny.yaml").write_text(TINY)
    options = ["--config", str(folder / "tiny.yaml"), "--out-dir", str(folder / "run")]
    return ["flce_dist.launch.train", *options]


def test_training_over_two_nodes_gives_the_same_bits(reference: Path, tmp_path: Path) -> None:
    statuses, texts = run(two_nodes(*train(tmp_path)), 2, tmp_path / "logs")
    assert statuses == [0, 0], texts
    losses = [record["loss"] for record in records(reference)]
    assert len(set(losses)) == len(losses) == 15  # 12 steps and 3 validations, none alike
    assert records(tmp_path / "run") == records(reference)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000012"
    shards = sorted(path.name for path in checkpoint.glob("rank-*"))
    assert shards == ["rank-00000.pt", "rank-00001.pt"]


def test_a_rank_killed_on_one_node_restarts_both(reference: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with started(two_nodes(*train(tmp_path)), 2, logs) as agents:
        deadline = time.monotonic() + SECONDS
        while not any(record["step"] >= 6 for record in records(tmp_path / "run")):
            assert time.monotonic() < deadline and agents[1].poll() is None, outputs(logs)
            time.sleep(0.005)
        for pid in descendants(agents[1].pid)[1:]:
            os.kill(pid, signal.SIGKILL)
        statuses, texts = statuses_of(agents, logs), outputs(logs)
    assert statuses == [0, 0], texts
    assert sum(f"continuing {tmp_path / 'run' / 'checkpoints'}" in text for text in texts) == 1
    assert records(tmp_path / "run") == records(reference)
