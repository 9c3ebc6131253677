#!/usr/bin/env bash
# lycoris-lora 4.1.3: dropout, which the README's example gives to LoCon (LoRA), has no effect there
# unless bypass_mode=True is given too: outputs and gradients of training are those without dropout.
# LoHa and LoKr at least print that they have none, and LoCon warns that weight_decompose=True
# ignores it. Here is no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 lycoris-lora==4.1.3
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys

import torch

logging.disable()
from lycoris import LycorisNetwork, create_lycoris  # noqa: E402

LycorisNetwork.apply_preset({"target_module": ["Linear"]})
inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def largest_change(**options):
    """Return how far outputs and gradients are, in training, from those without dropout."""
    results = []
    for dropout in (0.0, 0.9):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128))
        network = create_lycoris(model, linear_dim=4, algo="locon", dropout=dropout, **options)
        network.apply_to()
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.train()
        network.train()
        outputs = model(inputs)
        outputs.square().mean().backward()
        gradients = [parameter.grad.flatten() for parameter in network.parameters()]
        results.append((outputs.detach(), torch.cat(gradients)))
    (outputs, gradients), (dropped_outputs, dropped_gradients) = results
    return (
        (dropped_outputs - outputs).abs().max().item(),
        (dropped_gradients - gradients).abs().max().item(),
    )


ignored = largest_change()
heeded = largest_change(bypass_mode=True)
print(f"LoCon in training, dropout=0.9 instead of 0, outputs up to {ignored[0]:.3f} and")
print(f"    gradients up to {ignored[1]:.3f} away; with bypass_mode=True too,")
print(f"    outputs up to {heeded[0]:.3f} and gradients up to {heeded[1]:.3f}")
is_as_described = max(ignored) == 0 and min(heeded) > 0.01
sys.exit(0 if is_as_described else "LoCon now heeds dropout")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
