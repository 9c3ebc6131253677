"""Time a fine-tuning step of a small model of transformers, without the plug-in and with it.

    python -m flce_dist.launch.finetune --config configs/finetune/lora.yaml

A Llama of random weights, built from a config, has PEFT's LoRA on its attention layers. A step is
forward, backward and AdamW. All runs are in one process and take turns, so that a warm GPU or a
busy host affects all alike. Result: out.json, {"about": {...}, "records": [...]}.
"""

from flce_dist.launch.program import RunError, launcher_number, run_program  # isort: skip  # first

import dataclasses
import importlib.util
import math
import random
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flce_dist.launch.about import about, version_of
from flce_dist.launch.call_time import call_ms, percentiles
from flce_dist.launch.finetune.config import FinetuneConfig, RunSpec, load_config
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.launch.process_group import device_type_of
from flce_dist.launch.write import check_writable, with_suffix, write_json

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LIBRARIES = "transformers", "peft"
LOSS_BUDGET = 1e-4
"""Relative difference that the plug-in's loss may have, or one eps of the dtype if more."""


@dataclass
class Measured:
    """A run: one step of it, and what is known of its steps."""

    spec: RunSpec
    step: Callable[[], Tensor]
    loss: float = 0.0  # of the first step
    peak_bytes: int = 0  # of a step, above parameters and the optimizer's state
    samples_ms: list[float] = field(default_factory=list)  # of one step each


def main(args: list[str] | None = None) -> int:
    """Return 0 if the losses with the plug-in are those without it, else 1."""
    config = load_config(sys.argv[1:] if args is None else args)
    P = launcher_number("WORLD_SIZE", alone=1)
    if P > 1:
        raise RunError(
            f"a fine-tuning step is one process's, got {P} ranks: start it without torchrun"
        )
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise RunError(f"a fine-tuning step needs {missing[0]}: pip install {' '.join(missing)}")
    device = torch.device(device_type_of(config.device))
    path = with_suffix(config.out, ".json")
    check_writable(path)
    runs = [Measured(spec, _step_of(spec, config, device)) for spec in config.runs]
    for run in runs:
        _warm_up(run, config, device)
    order = random.Random(config.seed)
    for _ in range(config.rounds):
        for run in order.sample(runs, len(runs)):
            run.step()  # so that the clock is the one that this run leads to
            run.samples_ms.append(call_ms(run.step, config.steps, device))
    records = _records(runs, config)
    _write(path, config, device, records)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(records))
    console.print(f"records in {path}", highlight=False)
    return int(any(record["status"] != "ok" for record in records))


def _step_of(spec: RunSpec, config: FinetuneConfig, device: torch.device) -> Callable[[], Tensor]:
    """Build the model of a run; return its step, which returns the loss."""
    model = _model(spec, config, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    generator = torch.Generator().manual_seed(config.seed)
    size = config.batch_size, config.seq_length
    ids = torch.randint(config.vocab_size, size, generator=generator)
    labels = ids.clone()
    labels[:, : config.prompt_tokens] = -100
    ids = ids.to(device)
    labels = labels.to(device)

    def step() -> Tensor:
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _model(spec: RunSpec, config: FinetuneConfig, device: torch.device) -> Any:
    """Return the model in training, with its adapters; the same weights in every run."""
    import peft
    import transformers

    from flce_dist.hf import use_linear_cross_entropy

    of_model = transformers.LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.seq_length,
        tie_word_embeddings=False,
    )
    torch.manual_seed(config.seed)
    with device:
        model: Any = transformers.LlamaForCausalLM(of_model)
    model = model.to(DTYPES[config.dtype])
    layers = [*config.adapted, *(["lm_head"] if spec.adapts_head else [])]
    lora = peft.LoraConfig(r=config.rank, target_modules=layers, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora).train()
    return use_linear_cross_entropy(model) if spec.plug_in else model


def _warm_up(run: Measured, config: FinetuneConfig, device: torch.device) -> None:
    """Run the first steps, and measure the memory of one more."""
    run.loss = run.step().item()
    for _ in range(config.warmup - 1):
        run.step()
    with peak_memory(device) as peak:
        run.step()
    run.peak_bytes = peak.bytes


def _records(runs: list[Measured], config: FinetuneConfig) -> list[dict[str, Any]]:
    """Return a flat record of each run; ``ratio`` is over the same step of transformers."""
    theirs = {run.spec.adapts_head: run for run in runs if not run.spec.plug_in}
    return [_record(run, theirs.get(run.spec.adapts_head), config) for run in runs]


def _record(run: Measured, theirs: Measured | None, config: FinetuneConfig) -> dict[str, Any]:
    p20, p50, p80 = percentiles(run.samples_ms)
    ratio = error = None
    is_right = math.isfinite(run.loss)
    if theirs is not None:
        ratio = p50 / percentiles(theirs.samples_ms)[1]
        error = abs(run.loss - theirs.loss) / abs(theirs.loss)
        is_right = error <= max(LOSS_BUDGET, torch.finfo(DTYPES[config.dtype]).eps)
    return {
        "impl": run.spec.impl,
        "mode": "step",
        "adapts_head": run.spec.adapts_head,
        **config.size,
        "p20_ms": p20,
        "p50_ms": p50,
        "p80_ms": p80,
        "peak_mib": run.peak_bytes / 2**20,
        "loss": run.loss,
        "loss_error": error,
        "ratio": ratio,
        "status": "ok" if is_right else "wrong",
    }


def _write(
    path: Path, config: FinetuneConfig, device: torch.device, records: list[dict[str, Any]]
) -> None:
    values = dataclasses.asdict(config)
    del values["out"]
    facts = {
        "command": shlex.join(["python", "-m", "flce_dist.launch.finetune", *sys.argv[1:]]),
        "ranks": 1,
        **about(device),
        "peers": {name: version_of(name) for name in LIBRARIES},
        "config": values,
    }
    write_json(path, {"about": facts, "records": records})


def _table(records: list[dict[str, Any]]) -> Table:
    made = Table(title="a fine-tuning step: forward, backward, AdamW")
    for heading in ("loss of", "LoRA on the output layer", "ms", "MiB", "ratio", "loss", "status"):
        made.add_column(heading)
    for record in records:
        numbers = f"{record['p50_ms']:.2f}", f"{record['peak_mib']:.0f}"
        ratio = "" if record["ratio"] is None else f"{record['ratio']:.3f}"
        head = "yes" if record["adapts_head"] else "no"
        loss = f"{record['loss']:.5f}"
        made.add_row(record["impl"], head, *numbers, ratio, loss, record["status"])
    return made


if __name__ == "__main__":
    run_program(main)
