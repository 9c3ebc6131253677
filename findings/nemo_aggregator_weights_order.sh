#!/usr/bin/env bash
# nemo-toolkit 3.0.0: AggregatorLoss with ten inputs or more gives its weights to other losses than
# their names say. It sorts loss_1, loss_2, ... as strings, so that loss_10 comes second, and takes
# the weights in that order. No error, no warning; with nine inputs it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 "nemo-toolkit[core]==3.0.0" \
  einops==0.8.1 pandas==3.1.1 sentencepiece==0.2.3
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

warnings.filterwarnings("ignore")

import nemo.utils
import torch

nemo.utils.logging.setLevel(logging.ERROR)

from nemo.collections.common.losses import AggregatorLoss

is_as_described = True
for number in (9, 12):
    weights = [float(index) for index in range(1, number + 1)]
    aggregator = AggregatorLoss(num_inputs=number, weights=weights)
    seen = []
    for chosen in range(1, number + 1):
        losses = {f"loss_{index}": torch.tensor(0.0) for index in range(1, number + 1)}
        losses[f"loss_{chosen}"] = torch.tensor(1.0)
        seen.append(aggregator(**losses).item())
    print(f"{number} inputs, weights {weights}")
    print(f"    weight that each loss gets: {seen}")
    is_as_described &= (seen == weights) == (number == 9)
    is_as_described &= sorted(seen) == weights
sys.exit(0 if is_as_described else "each loss gets its weight")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
