"""Train a GPT on real text: tensor- and data-parallel, killed and continued at will.

    python -m flce_dist.launch.train --config configs/quickstart.yaml

starts the ranks of one replica on this host. For other numbers of ranks, and several hosts::

    torchrun --nproc-per-node 4 -m flce_dist.launch.train --config configs/quickstart.yaml

All that a step depends on (weights, optimizer, position in the data) is in the checkpoints, so a
run that is killed and started again ends where it would have. ``run`` has the loop.
"""

import os
import sys
from contextlib import ExitStack

from flce_dist.launch.process_group import on_rank_0
from flce_dist.launch.program import run_program
from flce_dist.launch.train import ranks
from flce_dist.launch.train.config import load_config
from flce_dist.launch.train.lock import locked


def main() -> int:
    ranks.end_with_torchrun()
    arguments = sys.argv[1:]
    rank = os.environ.get("RANK")
    if rank is None:
        tensor = load_config(arguments).parallel.tensor
        return ranks.start_ranks(tensor, "flce_dist.launch.train", arguments)
    world_size = int(os.environ["WORLD_SIZE"])
    config = load_config(arguments, world_size=world_size, show_errors=rank == "0")
    device = ranks.choose_device(config)
    ranks.join_ranks(device)
    with ranks.said("loading libraries, vocabulary and text"):
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
