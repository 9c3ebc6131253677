"""Train a GPT on real text: tensor-, context- and data-parallel, killed and continued at will.

    python -m flce_dist.launch.train --config configs/quickstart.yaml

starts the ranks of one replica on this host. For other numbers of ranks, and several hosts::

    torchrun --nproc-per-node 4 -m flce_dist.launch.train --config configs/quickstart.yaml

Each step: the loss of one batch through megatron-core's GPTModel and linear_cross_entropy, its
gradients, one update. All that a step depends on (weights, optimizer, generators, position in the
data) is in the checkpoints, so a run that is killed and started again ends where it would have.
This module reads the command line and torchrun's environment; ``run`` has the loop.
"""

import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist

from flce_dist.launch.program import run_program
from flce_dist.launch.train.config import RunConfig, load_config
from flce_dist.launch.train.exit import end_with_torchrun
from flce_dist.launch.train.lock import held
from flce_dist.launch.train.ranks import said
from flce_dist.launch.yaml_config import ConfigError


def main() -> int:
    end_with_torchrun()
    if "RANK" not in os.environ:
        return start(sys.argv[1:])
    config = load_config(
        sys.argv[1:],
        world_size=int(os.environ["WORLD_SIZE"]),
        show_errors=os.environ["RANK"] == "0",
    )
    device = choose_device(config)

    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Objects (what ranks decide together) go over gloo, tensors over NCCL.
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    # megatron-core warns of each optional package that is not there, names what it will deprecate,
    # and calls collectives by names that newer PyTorch deprecates.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    with held(config.out_dir):
        with said("loading libraries, vocabulary and text"):
            # Seconds, for which no error waits.
            from flce_dist.launch.train.data import open_corpus, tokenise
            from flce_dist.launch.train.ranks import on_rank_0
            from flce_dist.launch.train.run import run

            corpus = open_corpus(config, on_rank_0(lambda: tokenise(config)))
        return run(config, corpus, device)


def start(arguments: list[str]) -> int:
    """Check the configuration, and start the ranks of this host."""
    from flce_dist.launch.train.start import start_ranks

    ranks = load_config(arguments).parallel.replica
    return start_ranks(ranks, ["-m", "flce_dist.launch.train", *arguments])


def choose_device(config: RunConfig) -> torch.device:
    """Return this rank's device.

    Raises:
        ConfigError: if the machine has no GPU for it, or ``head.impl`` cannot run on it.
    """
    gpus = torch.cuda.device_count()
    kind = ("cuda" if gpus else "cpu") if config.device == "auto" else config.device
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if kind == "cuda" and local_ranks > gpus:
        raise ConfigError(
            f"device=cuda needs a GPU for each of the {local_ranks} ranks here, found {gpus}"
        )
    if kind == "cpu" and config.head.impl == "triton":
        raise ConfigError("head.impl=triton needs GPUs; on CPU use eager or leave it out")
    return torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")


if __name__ == "__main__":
    run_program(main)
