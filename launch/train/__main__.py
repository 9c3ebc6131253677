"""Train a GPT on real text: tensor- and data-parallel, killed and continued at will.

    python -m flce_dist.launch.train --config configs/quickstart.yaml

starts the ranks of one replica on this host. For other numbers of ranks, and several hosts::

    torchrun --nproc-per-node 4 -m flce_dist.launch.train --config configs/quickstart.yaml

All that a step depends on (weights, optimizer, position in the data) is in the checkpoints, so a
run that is killed and started again ends where it would have. ``run`` has the loop.
"""

import sys
from contextlib import ExitStack
from pathlib import Path

from flce_dist.launch.process_group import on_rank_0
from flce_dist.launch.program import has_launcher, launcher_number, run_program
from flce_dist.launch.train import ranks
from flce_dist.launch.train.checkpoint import named
from flce_dist.launch.train.config import load_config
from flce_dist.launch.train.lock import locked

SIGNALLED = 128
"""Statuses above it are of a signal, by its number."""


def main() -> int:
    ranks.end_with_torchrun()
    arguments = sys.argv[1:]
    if not has_launcher():
        config = load_config(arguments)
        status = ranks.start_ranks(config.parallel.tensor, "flce_dist.launch.train", arguments)
        if status > SIGNALLED:
            # Behind a progress bar, whose line a rank that was killed has not ended.
            ranks.say(f"\nstopped; {way_on(config.out_dir)}")
        return status
    rank = launcher_number("RANK")
    world_size = launcher_number("WORLD_SIZE")
    config = load_config(arguments, world_size=world_size, show_errors=rank == 0)
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


def way_on(out_dir: Path) -> str:
    """Say what the same command will do after a run that was stopped."""
    found = named(out_dir / "checkpoints")
    return f"the same command {f'continues {found[-1]}' if found else 'starts at step 0'}"


if __name__ == "__main__":
    run_program(main)
