"""Training runs of seconds, under torchrun and in simulated ranks, and what they leave."""

import functools
import json
from pathlib import Path
from typing import Any

import torch

from flce_dist.launch.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from flce_dist.launch.train.data import Corpus, load_tokenizer
from tests.shared_groups import group_of

TINY = """
steps: 9
validate_every: 3
checkpoint_every: 3
device: cpu
compare: false
model: {hidden_size: 16, num_layers: 1, num_heads: 2, ffn_hidden_size: 16, seq_length: 16}
data: {batch_size: 1, validation_batches: 1}
optimizer: {lr: 0.03, warmup_steps: 2, decay_steps: 9}
"""
load_once = functools.cache(load_tokenizer)
"""In its place: each load takes a second."""
VOCAB = 64
CONFIG = RunConfig(
    model=ModelConfig(
        hidden_size=16, num_layers=1, num_heads=2, ffn_hidden_size=16, seq_length=8, init_std=0.2
    ),
    data=DataConfig(batch_size=2, validation_batches=1),
    optimizer=OptimizerConfig(lr=0.02, warmup_steps=1, decay_steps=4),
)


def forget_earlier_runs() -> None:
    """Let Megatron be initialized anew in this rank; it keeps the process groups that there are."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.create_group = group_of


def corpus(rows: int = 10) -> Corpus:
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(VOCAB, (rows + 4, 9), generator=generator)
    return Corpus(sequences[:rows], sequences[rows:], VOCAB, seed=1)


def records(out_dir: Path) -> list[dict[str, Any]]:
    """Complete lines of metrics.jsonl, without what differs from run to run."""
    path = out_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    # The peak holds gloo's own copies, which its thread frees when it comes to that.
    measured = ("tokens_per_s", "step_ms", "head_peak_mib")
    return [{k: v for k, v in entry.items() if k not in measured} for entry in entries]


def program(folder: Path) -> list[str]:
    """Return the run's module and arguments, for torchrun; ``folder / "run"`` is its output."""
    (folder / "tiny.yaml").write_text(TINY)
    arguments = ["--config", str(folder / "tiny.yaml"), "--out-dir", str(folder / "run")]
    return ["-m", "flce_dist.launch.train", *arguments]
