"""A training run of seconds, what it leaves, and how it is ended: for tests that start torchrun."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

TINY = """
steps: 12
validate_every: 4
checkpoint_every: 4
device: cpu
compare: false
model: {hidden_size: 16, num_layers: 1, num_heads: 2, ffn_hidden_size: 16, seq_length: 32}
data: {batch_size: 2, validation_batches: 1}
optimizer: {lr: 0.03, warmup_steps: 2, decay_steps: 12}
"""


def records(out_dir: Path) -> list[dict[str, Any]]:
    """Complete lines of metrics.jsonl, without what differs from run to run."""
    path = out_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in entry.items() if k != "tokens_per_s"} for entry in entries]


def kill(process: subprocess.Popen[Any]) -> None:
    """SIGKILL for a process and all below it; torchrun gives its workers sessions of their own."""
    for pid in descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Return a process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [pid] + [below for child in children for below in descendants(int(child))]


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
