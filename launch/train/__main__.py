"""Train a GPT on real text: tensor- and data-parallel, killed and continued at will.

    python -m flce_dist.launch.train --config configs/quickstart.yaml

starts the ranks of one replica on this host. For other numbers of ranks, and several hosts::

    torchrun --nproc-per-node 4 -m flce_dist.launch.train --config configs/quickstart.yaml

Each step: the loss of one batch through megatron-core's GPTModel and linear_cross_entropy, its
gradients, one update. All that a step depends on (weights, optimizer, position in the data) is in
the checkpoints, so a run that is killed and started again ends where it would have. ``run`` has
the loop.
"""

import os
import sys
from contextlib import ExitStack

from flce_dist.launch.program import run_program
from flce_dist.launch.train.config import load_config
from flce_dist.launch.train.lock import locked
from flce_dist.launch.train.ranks import (
    choose_device,
    end_with_torchrun,
    join_ranks,
    on_rank_0,
    said,
    start_ranks,
)


def main() -> int:
    end_with_torchrun()
    if "RANK" not in os.environ:
        ranks = load_config(sys.argv[1:]).parallel.tensor
        return start_ranks(ranks, "flce_dist.launch.train", sys.argv[1:])
    config = load_config(
        sys.argv[1:],
        world_size=int(os.environ["WORLD_SIZE"]),
        show_errors=os.environ["RANK"] == "0",
    )
    device = choose_device(config)
    join_ranks(device)
    with said("loading libraries, vocabulary and text"):
        # Seconds, for which no error waits.
        from flce_dist.launch.train.data import open_corpus, tokenise
        from flce_dist.launch.train.run import run

        # Before the folder is made: a text that will not do leaves none.
        corpus = open_corpus(config, on_rank_0(lambda: tokenise(config)))
    with ExitStack() as stack:
        on_rank_0(lambda: stack.enter_context(locked(config.out_dir)))
        return run(config, corpus, device)


if __name__ == "__main__":
    run_program(main)
