"""The configuration of a measured fine-tuning step: a model of transformers, its adapters, runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from flce_dist.launch.ranges import SEED, SIZE, SIZE_OR_0
from flce_dist.launch.yaml_config import check_ranges, from_command_line, require

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Of a Llama, beside the output layer."""


@dataclass(frozen=True)
class RunSpec:
    """One way to train the model."""

    plug_in: bool = True
    """The loss is ours, by flce_dist.hf; else that of transformers."""
    adapts_head: bool = False
    """LoRA is on the output layer, too; else that is frozen."""

    @property
    def impl(self) -> str:
        return "flce_dist" if self.plug_in else "transformers"


@dataclass(frozen=True)
class FinetuneConfig:
    out: Path = Path("runs/finetune")
    """Stem of the result file, out.json."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Annotated[int, SEED] = 0
    hidden_size: Annotated[int, SIZE] = 2048
    ffn_hidden_size: Annotated[int, SIZE] = 8192
    num_layers: Annotated[int, SIZE] = 2
    num_heads: Annotated[int, SIZE] = 32
    num_kv_heads: Annotated[int, SIZE] = 8
    vocab_size: Annotated[int, SIZE] = 128256
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of all parameters but the adapters', which are fp32."""
    batch_size: Annotated[int, SIZE] = 4
    seq_length: Annotated[int, SIZE] = 2048
    prompt_tokens: Annotated[int, SIZE_OR_0] = 0
    """Tokens at the start of each sequence whose labels are ignored."""
    rank: Annotated[int, SIZE] = 16
    """Of the adapters."""
    adapted: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """The layers that have one: any of q_, k_, v_, o_, gate_, up_ and down_proj."""
    warmup: Annotated[int, SIZE] = 3
    """Steps of each run before anything is timed, at least 1: kernels compile in the first."""
    rounds: Annotated[int, SIZE] = 10
    """Samples of each run; runs take turns."""
    steps: Annotated[int, SIZE] = 5
    """Of a sample, behind one that is not timed."""
    runs: tuple[RunSpec, ...] = (RunSpec(plug_in=False), RunSpec())

    @property
    def size(self) -> dict[str, int | str]:
        T = self.batch_size * self.seq_length
        layers = {"layers": self.num_layers, "dtype": self.dtype, "lora_rank": self.rank}
        return {"T": T, "H": self.hidden_size, "V": self.vocab_size, **layers}


def load_config(argv: list[str]) -> FinetuneConfig:
    """Return the configuration of ``--config FILE [--overrides]``, checked."""
    config = from_command_line(
        FinetuneConfig, argv, show_errors=True,
        prog="python -m flce_dist.launch.finetune --config FILE",
        description="Time a fine-tuning step without the plug-in for transformers, and with it.",
    )  # fmt: skip
    check_ranges(config)
    require(bool(config.runs), "runs must name at least one run, got none")
    require(len(set(config.runs)) == len(config.runs), "runs must differ, got one twice")
    are_layers = bool(config.adapted) and set(config.adapted) <= set(LAYERS)
    require(are_layers, f"adapted must name some of {', '.join(LAYERS)}, got {config.adapted}")
    for name in ("seq_length", "vocab_size"):  # with one the loss is 0, or of no token
        size = getattr(config, name)
        require(size > 1, f"{name} must be at least 2, got {size}")
    heads = config.num_heads
    kv_heads = config.num_kv_heads
    require(heads % kv_heads == 0, f"num_heads must divide by num_kv_heads {kv_heads}, got {heads}")
    require(
        config.hidden_size % (2 * heads) == 0,  # rotary embeddings turn pairs of a head's features
        f"hidden_size must divide by twice num_heads {heads}, got {config.hidden_size}",
    )
    prompt = config.prompt_tokens
    length = config.seq_length
    require(prompt < length, f"prompt_tokens must be below seq_length {length}, got {prompt}")
    return config
