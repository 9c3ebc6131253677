#!/usr/bin/env bash
# unit-scaling 0.3.5: cross_entropy and CrossEntropyLoss, whose documentation says that "the loss is
# averaged over non-ignored targets", divide by all targets: with three of four tokens ignored, as
# prompts and padding are, the loss is a quarter of that of PyTorch. Without ignored targets both
# agree. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 unit-scaling==0.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F
import unit_scaling
import unit_scaling.functional as U

torch.manual_seed(0)
logits = torch.randn(16, 50, dtype=torch.float64)
labels = torch.randint(50, (16,))
documentation = " ".join(U.cross_entropy.__doc__.split())
promise = "the loss is averaged over non-ignored targets"
is_as_described = promise in documentation
is_as_described &= "ignore_index (int?): **[not supported" not in documentation
for ignored in (0, 4, 8, 12):
    targets = labels.clone()
    targets[:ignored] = -100
    expected = F.cross_entropy(logits, targets).item()
    by_hand = F.cross_entropy(logits[ignored:], labels[ignored:]).item()
    got = U.cross_entropy(logits, targets).item()
    by_module = unit_scaling.CrossEntropyLoss(ignore_index=-100)(logits, targets).item()
    shortened = U.cross_entropy(logits[ignored:], labels[ignored:]).item()
    print(f"{ignored:2} of 16 targets ignored: {got:.4f} and {by_module:.4f},", end=" ")
    print(f"torch {expected:.4f}, unit-scaling on the others {shortened:.4f}")
    is_as_described &= max(abs(by_hand - expected), abs(shortened - expected)) < 1e-9
    is_as_described &= abs(got - expected * (16 - ignored) / 16) < 1e-9 and got == by_module
sys.exit(0 if is_as_described else "the loss is now averaged over targets not ignored")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
