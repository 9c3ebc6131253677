#!/usr/bin/env bash
# loralib 0.1.2: Conv2d takes lora_dropout, makes an nn.Dropout of it, and never applies it. Outputs
# in training are the same each time and those without dropout, even with lora_dropout=0.9, where
# nine tenths of the adapter's inputs should be zero. Linear and MergedLinear, given the same
# argument, apply it. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 loralib==0.1.2
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import loralib
import torch

print("torch", torch.__version__, "loralib", version("loralib"))
torch.manual_seed(0)
channels = 8
layers = {
    "Linear": loralib.Linear(channels, channels, r=4, lora_dropout=0.9),
    "MergedLinear": loralib.MergedLinear(
        channels, channels, r=4, lora_dropout=0.9, enable_lora=[True, True]
    ),
    "Conv2d": loralib.Conv2d(channels, channels, 3, r=4, lora_dropout=0.9),
}


@torch.no_grad()
def spread(name, layer):
    """Return how far two forward passes in training and one in evaluation are from each other."""
    torch.nn.init.normal_(layer.lora_B, std=0.5)
    shape = (2, channels, 6, 6) if name == "Conv2d" else (2, channels)
    inputs = torch.randn(shape)
    layer.train()
    first, second = layer(inputs), layer(inputs)
    layer.eval()
    evaluated = layer(inputs)
    return (first - second).abs().max().item(), (first - evaluated).abs().max().item()


spreads = {name: spread(name, layer) for name, layer in layers.items()}
for name, (again, evaluated) in spreads.items():
    print(f"{name}, lora_dropout=0.9, in training: at most {again:.6f} from a second pass,")
    print(f"    at most {evaluated:.6f} from evaluation")
is_applied = all(min(spreads[name]) > 0.1 for name in ("Linear", "MergedLinear"))
is_ignored = spreads["Conv2d"][0] == 0 and spreads["Conv2d"][1] < 1e-4
sys.exit(0 if is_applied and is_ignored else "loralib's Conv2d now applies lora_dropout")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
