#!/usr/bin/env bash
# nemo-toolkit 3.0.0: if loss_mask masks all samples of a batch, CrossEntropyLoss computes the loss
# of the logits with their own best classes as labels. That is not 0, and its gradient trains the
# model on what was to be left out, to be surer of what it predicts already. Its docstring says that
# loss_mask is the masking; if some samples are left, masked ones have no gradient. No error, no
# warning.
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

from nemo.collections.common.losses import CrossEntropyLoss

labels = torch.tensor([0, 1, 2, 3])
logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
criterion = CrossEntropyLoss()
best = torch.nn.functional.cross_entropy(logits, logits.argmax(dim=-1)).item()
print(f"loss with the best classes of the logits as labels: {best:.4f}")
is_as_described = True
for mask in ([1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]):
    loss = criterion(logits=logits, labels=labels, loss_mask=torch.tensor(mask))
    (gradient,) = torch.autograd.grad(loss, logits)
    of_masked = gradient[torch.tensor(mask) == 0].norm().item()
    print(f"mask {mask}: loss {loss.item():.4f}, norm of masked gradients {of_masked:.4f}")
    if mask == [0, 0, 0, 0]:
        is_as_described &= abs(loss.item() - best) < 1e-6 and of_masked > 0.1
    else:
        is_as_described &= of_masked == 0
sys.exit(0 if is_as_described else "a batch of masked samples has no gradient")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
