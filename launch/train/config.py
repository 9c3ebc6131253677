"""The configuration of a training run: a YAML file gives the values, the command line overrides.

``RunConfig`` is the schema of both. ``load_config`` finds all that can be wrong with a
configuration, before there is a process group.
"""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from flce_dist import LinearCrossEntropy, filtered
from flce_dist.launch.ranges import (
    BELOW_1,
    BETWEEN_0_AND_1,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    SIZE,
    SIZE_OR_0,
)
from flce_dist.launch.yaml_config import ConfigError, check_ranges, from_command_line, require


@dataclass(frozen=True)
class ModelConfig:
    hidden_size: Annotated[int, SIZE] = 128
    num_layers: Annotated[int, SIZE] = 2
    num_heads: Annotated[int, SIZE] = 4
    ffn_hidden_size: Annotated[int, SIZE] = 512
    seq_length: Annotated[int, SIZE] = 256
    """Tokens of one sequence."""
    tie_embeddings: bool = True
    """Use the input embedding as the output layer's weight."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations; the optimizer keeps fp32 copies of bf16 parameters."""
    init_std: Annotated[float, POSITIVE] = 0.02


@dataclass(frozen=True)
class DataConfig:
    text: Path | None = None
    """A UTF-8 text file; without one, the reference manual that every CPython carries."""
    batch_size: Annotated[int, SIZE] = 2
    """Sequences of one microbatch."""
    microbatches: Annotated[int, SIZE] = 1
    """Microbatches of a step on each data-parallel replica, whose gradients are accumulated."""
    prompt_tokens: Annotated[int, SIZE_OR_0] = 0
    """Tokens at the start of each sequence whose labels are ignored, as a prompt's are."""
    by_frequency: bool = False
    """Renumber tokens by how often the training text has them, as head.filter_eps needs it."""
    validation_fraction: Annotated[float, BETWEEN_0_AND_1] = 0.05
    """Share of the text, at its end, that is never trained on."""
    validation_batches: Annotated[int, SIZE] = 4
    """Batches of one validation, on each data-parallel replica the same."""


@dataclass(frozen=True)
class HeadConfig:
    """The output layer and loss, and the options of ours."""

    kind: Literal["linear_cross_entropy", "megatron_fused", "megatron_unfused"] = (
        "linear_cross_entropy"
    )
    """megatron_*: Megatron's own layer with the loss of cross_entropy_loss_fusion, or without."""
    schedule: Literal["auto", "cached", "recompute", "in_forward"] = "auto"
    max_logits_bytes: int | None = None
    impl: Literal["triton", "eager"] | None = None
    """None: triton on GPUs, eager on CPU."""
    label_smoothing: float = 0.0
    z_loss_weight: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    filter_eps: Annotated[float | None, BELOW_1] = None
    """Approximate gradients where no probability reaches this; faster with data.by_frequency."""
    skip_ignored: bool = False
    """Leave out the tokens that data.prompt_tokens ignores."""

    @property
    def is_ours(self) -> bool:
        return self.kind == "linear_cross_entropy"

    def options(self) -> dict[str, Any]:
        """Return the keywords of ``use_linear_cross_entropy``."""
        not_of_the_op = ("kind", "filter_eps")
        options = {name: x for name, x in vars(self).items() if name not in not_of_the_op}
        if self.filter_eps is not None:
            options["schedule"] = filtered.schedule(self.filter_eps)
        # Only a sum can be differentiated before its upstream gradient is known.
        return options | {"reduction": "sum" if self.schedule == "in_forward" else "none"}


@dataclass(frozen=True)
class OptimizerConfig:
    lr: Annotated[float, POSITIVE] = 3e-3
    min_lr: Annotated[float, NOT_NEGATIVE] = 3e-4
    warmup_steps: Annotated[int, SIZE_OR_0] = 10
    decay_steps: Annotated[int, SIZE] = 100
    """The learning rate falls along a cosine until this step and stays at min_lr."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    beta1: Annotated[float, BELOW_1] = 0.9
    beta2: Annotated[float, BELOW_1] = 0.95
    clip_norm: Annotated[float, POSITIVE] = 1.0


@dataclass(frozen=True)
class ParallelConfig:
    tensor: Annotated[int, SIZE] = 2
    """Ranks that share the weights of one replica."""
    sequence_parallel: bool = True
    """Split activations between layers by token. Means nothing where tensor is 1."""


@dataclass(frozen=True)
class RunConfig:
    out_dir: Path = Path("runs/train")
    """Checkpoints, metrics and figures; a run that finds checkpoints there continues them."""
    steps: Annotated[int, SIZE] = 100
    """Train until this step; may be raised to continue a finished run."""
    seed: Annotated[int, SEED] = 1234
    device: Literal["auto", "cpu", "cuda"] = "auto"
    validate_every: Annotated[int, SIZE] = 25
    checkpoint_every: Annotated[int, SIZE] = 25
    keep_checkpoints: Annotated[int, SIZE] = 2
    compare: bool = True
    """At the end of a run with our head, compare it against Megatron's own on one batch."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


# What may differ between a checkpoint and the run that continues it: nothing in the numbers of a
# step depends on these.
MAY_CHANGE_ON_RESUME = frozenset(
    """out_dir steps device validate_every checkpoint_every keep_checkpoints compare
    data.validation_batches data.text""".split()
)

TEXT_SHA256 = "data.text.sha256"
"""By which a checkpoint knows its text, wherever that lies."""


def load_config(
    argv: list[str], *, world_size: int | None = None, show_errors: bool = True
) -> RunConfig:
    """Return the configuration of ``--config FILE [--overrides]``, checked.

    ``world_size`` is the number of ranks; None for those of one replica. A wrong command line
    raises SystemExit, and says why if ``show_errors``; a wrong value or combination raises
    ConfigError, which names it.
    """
    config = from_command_line(
        RunConfig, argv, show_errors=show_errors,
        prog="python -m flce_dist.launch.train --config FILE",
        description="Train a GPT on text with linear_cross_entropy as its output layer and loss.",
    )  # fmt: skip
    check_config(config, world_size=world_size or config.parallel.tensor)
    return config


def check_config(config: RunConfig, *, world_size: int) -> None:
    """Raise ``ConfigError`` for a combination that cannot run on ``world_size`` ranks."""
    check_ranges(config)
    model = config.model
    rate = config.optimizer
    head = config.head
    ranks = "the number of ranks that torchrun starts"
    tensor = "parallel.tensor"
    flat = {**flatten(config), ranks: world_size}
    multiples = [("model.hidden_size", "model.num_heads"), (ranks, tensor)]
    split = ("num_heads", "ffn_hidden_size", "seq_length")[: 2 + config.parallel.sequence_parallel]
    multiples += [(f"model.{name}", tensor) for name in split]
    for key, divisor in multiples:
        must = f"{key} must be divisible by {divisor} = {flat[divisor]}, got {flat[key]}"
        require(flat[key] % flat[divisor] == 0, must)
    for key, limit in ("min_lr", "lr"), ("warmup_steps", "decay_steps"):
        key = f"optimizer.{key}"
        limit = f"optimizer.{limit}"
        must = f"{key} must be at most {limit} = {flat[limit]}, got {flat[key]}"
        require(flat[key] <= flat[limit], must)
    head_size = model.hidden_size // model.num_heads
    require(
        head_size % 2 == 0,
        f"model.hidden_size / model.num_heads must be even for rotary embeddings, got {head_size}",
    )
    text = config.data.text
    prompt = config.data.prompt_tokens
    below = f"data.prompt_tokens must be below model.seq_length = {model.seq_length}, got {prompt}"
    require(prompt < model.seq_length, below)
    require(text is None or os.path.isfile(text), f"data.text must be a file, got {text}")
    require(
        rate.lr * rate.weight_decay < 1,
        f"optimizer.weight_decay must be below 1 / optimizer.lr = {1 / rate.lr}, got "
        f"{rate.weight_decay}",
    )
    require(
        head.filter_eps is None or head.schedule == "auto",
        "head.filter_eps needs head.schedule=auto, since it is a schedule of its own, got "
        f"head.schedule={head.schedule}",
    )
    try:  # errors begin with the name of an option
        LinearCrossEntropy(1, 1, device="meta", **head.options())
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"head.{error}") from error
    for name, value in vars(head).items():
        require(
            head.is_ours or name == "kind" or value == getattr(HeadConfig, name),
            f"head.{name} is an option of head.kind={HeadConfig.kind}, got {value} with "
            f"head.kind={head.kind}, where it must be its default, {getattr(HeadConfig, name)}",
        )


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return ``{"model.hidden_size": 128, ...}``; paths as strings, so that it fits into JSON."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        key = prefix + item.name
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, key + ".")
        else:
            flat[key] = str(value) if isinstance(value, Path) else value
    return flat


def resume_conflicts(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Name each value by which a checkpoint's flat configuration forbids to continue it.

    An option that the checkpoint's version did not have was as its default is.
    """
    saved = {**flatten(RunConfig()), **saved}

    def said(flat: dict[str, Any], key: str) -> str:
        if key not in flat:
            return "unknown"
        text = f" (of {flat.get('data.text') or 'the manual'})" if key == TEXT_SHA256 else ""
        return f"{flat.get(key)!r}{text}"

    return [
        f"{key} is {said(saved, key)} there and {said(now, key)} here"
        for key in sorted(saved.keys() | now.keys())
        if key not in MAY_CHANGE_ON_RESUME and saved.get(key) != now.get(key)
    ]
