#!/usr/bin/env bash
# lycoris-lora 4.1.3: onfly_restore() leaves a model on the CPU merged. onfly_merge() keeps the
# original weight with .cpu(), which on the CPU is no copy but the weight itself, and then writes
# over it. Merging and restoring again and again piles the differences up. On a GPU the original
# comes back. No error, no warning.
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
is_as_described = True
for algo in ("locon", "loha", "lokr", "full"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False))
    with torch.no_grad():
        original = model(inputs)
        network = create_lycoris(model, linear_dim=4, linear_alpha=4, algo=algo)
        network.apply_to()
        network.restore()
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        distances = []
        for _ in range(3):
            network.onfly_merge()
            network.onfly_restore()
            distances.append((model(inputs) - original).abs().max().item())
    numbers = ", ".join(f"{distance:.4f}" for distance in distances)
    print(f"{algo:5}: outputs after merging and restoring once, twice and thrice are up to")
    print(f"    {numbers} from the original ones")
    is_as_described &= distances[0] > 1e-3
    if algo != "full":
        is_as_described &= distances[0] < distances[1] < distances[2]
sys.exit(0 if is_as_described else "onfly_restore() brings the original weights back")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
