#!/usr/bin/env bash
# lycoris-lora 4.1.3: merge_to() of LoHa and LoKr multiplies the difference by alpha / dim twice,
# forward once, so that the merged layer has but a part of what was trained: a quarter of it with
# the default dimension of 4 and alpha of 1, a thirty-second with dimension 32. onfly_merge() does
# the same. LoCon merges right. No error, no warning.
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


def differences(algo, dim, alpha):
    """Return what an adapter adds to the outputs, before and after it was merged."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128))
    with torch.no_grad():
        base = model(inputs)
        network = create_lycoris(
            model, multiplier=1.0, linear_dim=dim, linear_alpha=alpha, algo=algo, factor=4
        )
        network.apply_to()
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        network.eval()
        added = model(inputs) - base
        network.restore()
        network.merge_to()
        return added, model(inputs) - base


is_as_described = True
for algo in ("locon", "loha", "lokr"):
    for dim, alpha in ((4, 4), (4, 1), (8, 1)):
        added, merged = differences(algo, dim, alpha)
        share = ((merged * added).sum() / (added * added).sum()).item()
        rest = ((merged - share * added).norm() / merged.norm()).item()
        print(f"{algo:5}, dimension {dim}, alpha {alpha}: ", end="")
        print(f"merged adds {share:.4f} of what forward added")
        expected = 1.0 if algo == "locon" else alpha / dim
        is_as_described &= abs(share - expected) < 1e-3 and rest < 1e-3
sys.exit(0 if is_as_described else "LoHa and LoKr now merge what forward adds")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
