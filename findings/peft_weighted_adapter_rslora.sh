#!/usr/bin/env bash
# peft 0.21.2: add_weighted_adapter gives the combined LoRA lora_alpha=r, for a scale of 1, since it
# multiplies the scales of the others into the weights. But it keeps use_rslora, with which this is
# a scale of sqrt(r). So of adapters with use_rslora=True even one alone, with weight 1, comes out
# sqrt(r) times as large ("svd" and "cat" are documented as precise). No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 peft==0.21.2
cat > "$folder/program.py" <<'PROGRAM'
import math
import sys

import torch
from peft import LoraConfig, get_peft_model

RANK, ALPHA = 8, 4


def delta(layer, name):
    """Return what an adapter adds to the weight, from its outputs, in fp64."""
    layer.set_adapter(name)
    inputs = torch.eye(layer.in_features, dtype=torch.float64)
    with torch.no_grad():
        return (layer(inputs) - layer.base_layer(inputs)).T


is_as_described = True
for use_rslora in (False, True):
    torch.manual_seed(0)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, use_rslora=use_rslora, target_modules=["0"],
        init_lora_weights=False,
    )
    base = torch.nn.Sequential(torch.nn.Linear(32, 32, dtype=torch.float64))
    model = get_peft_model(base, config, adapter_name="one", autocast_adapter_dtype=False)
    model.add_adapter("two", config)
    layer = model.base_model.model[0].double()
    scale = ALPHA / (math.sqrt(RANK) if use_rslora else RANK)
    deltas = {}
    for name in ("one", "two"):
        product = layer.lora_B[name].weight @ layer.lora_A[name].weight
        deltas[name] = scale * product.detach()
        is_as_described &= torch.allclose(delta(layer, name), deltas[name])
    print(f"use_rslora={use_rslora}, r={RANK}, lora_alpha={ALPHA}: scale {scale:.4f}")
    for names, weights, kind, rank in (
        (["one"], [1.0], "cat", RANK),
        (["one"], [1.0], "svd", RANK),
        (["one", "two"], [0.5, 0.5], "cat", 2 * RANK),
        (["one", "two"], [0.5, -1.0], "svd", 2 * RANK),
    ):
        combined = f"{'-'.join(names)}-{kind}"
        options = {"svd_rank": rank} if kind == "svd" else {}
        model.add_weighted_adapter(names, weights, combined, combination_type=kind, **options)
        model.base_model.model[0].double()
        expected = sum(w * deltas[name] for name, w in zip(names, weights, strict=True))
        ratio = (delta(layer, combined).norm() / expected.norm()).item()
        off = (delta(layer, combined) - ratio * expected).norm() / expected.norm()
        print(f"    {kind} of {names} with weights {weights}: {ratio:.4f} times the sum of these")
        factor = math.sqrt(rank) if use_rslora else 1.0
        is_as_described &= abs(ratio - factor) < 1e-4 and off.item() < 1e-3
sys.exit(0 if is_as_described else "combined adapters no longer keep use_rslora")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
