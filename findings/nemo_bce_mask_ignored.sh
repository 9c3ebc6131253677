#!/usr/bin/env bash
# nemo-toolkit 3.0.0: BCEWithLogitsLoss takes a loss_mask, which it declares as an optional input
# and checks the type of, and does not use it: masked samples count as all others. No error, no
# warning; CrossEntropyLoss of the same package leaves them out.
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

from nemo.collections.common.losses import BCEWithLogitsLoss, CrossEntropyLoss

generator = torch.Generator().manual_seed(0)
logits = torch.randn(4, 3, generator=generator)
attributes = [torch.randint(2, (4,), generator=generator) for _ in range(3)]  # one for each column
classes = torch.tensor([0, 1, 2, 0])
binary = BCEWithLogitsLoss()
cross_entropy = CrossEntropyLoss()
print(f"inputs of BCEWithLogitsLoss: {list(binary.input_types)}")
losses = {"BCEWithLogitsLoss": [], "CrossEntropyLoss": []}
for masked in ([1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 1]):
    mask = torch.tensor(masked)
    loss = binary(logits=logits, labels=attributes, loss_mask=mask)
    losses["BCEWithLogitsLoss"].append(loss.item())
    loss = cross_entropy(logits=logits, labels=classes, loss_mask=mask)
    losses["CrossEntropyLoss"].append(loss.item())
    print(f"mask {masked}: {', '.join(f'{name} {seen[-1]:.4f}' for name, seen in losses.items())}")
is_as_described = len(set(losses["BCEWithLogitsLoss"])) == 1
is_as_described &= len(set(losses["CrossEntropyLoss"])) == 3
is_as_described &= "loss_mask" in binary.input_types
sys.exit(0 if is_as_described else "BCEWithLogitsLoss leaves masked samples out")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
