#!/usr/bin/env bash
# torchdata 0.11.0: the tutorial of StatefulDataLoader says that the RandomSampler and BatchSampler
# of torch.utils.data are patched when it is imported, so that they need no state_dict of one's own.
# They are not: a loader with such a sampler that resumes from a state_dict in its second epoch
# draws a new permutation and skips as many of that, so that samples of the epoch are lost and
# others come twice. No error, no warning; with shuffle=True, and with the RandomSampler of
# torchdata.stateful_dataloader.sampler, it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchdata==0.11.0
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

warnings.filterwarnings("ignore")  # of torchdata's own use of torch

import torch
import torch.utils.data
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as samplers_of_torchdata

dataset = list(range(12))
data = torch.utils.data
loaders = {
    "shuffle=True": lambda: StatefulDataLoader(dataset, batch_size=3, shuffle=True),
    "RandomSampler of torchdata": lambda: StatefulDataLoader(
        dataset, batch_size=3, sampler=samplers_of_torchdata.RandomSampler(dataset)
    ),
    "RandomSampler of torch.utils.data": lambda: StatefulDataLoader(
        dataset, batch_size=3, sampler=data.RandomSampler(dataset)
    ),
    "BatchSampler and RandomSampler of torch.utils.data": lambda: StatefulDataLoader(
        dataset, batch_sampler=data.BatchSampler(data.RandomSampler(dataset), 3, drop_last=False)
    ),
}


def start(make, state):
    """Return a new loader, as a program that is started (again) makes it, after seeding."""
    torch.manual_seed(0)
    loader = make()
    if state is not None:
        loader.load_state_dict(state)
    return loader


is_as_described = True
for name, make in loaders.items():
    loader = start(make, None)
    for _ in loader:  # the first epoch
        pass
    epoch = iter(loader)
    before = [next(epoch).tolist() for _ in range(2)]
    state = loader.state_dict()
    rest = [batch.tolist() for batch in epoch]
    resumed = [batch.tolist() for batch in start(make, state)]
    seen = sum(before + resumed, [])
    twice = sorted(x for x in set(seen) if seen.count(x) == 2)
    lost = sorted(set(dataset) - set(seen))
    print(name)
    print(f"    second epoch: {before}, here the state is taken, {rest}")
    print(f"    resumed:      {resumed}; twice: {twice}, lost: {lost}")
    is_right = name in ("shuffle=True", "RandomSampler of torchdata")
    is_as_described &= (resumed == rest) == is_right
    is_as_described &= (lost == []) == is_right and (twice == []) == is_right
sys.exit(0 if is_as_described else "torch.utils.data.RandomSampler resumes otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
