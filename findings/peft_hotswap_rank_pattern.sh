#!/usr/bin/env bash
# peft 0.21.2: hotswap_adapter takes a LoRA's scale from r and lora_alpha alone in layers that
# rank_pattern or alpha_pattern name. So what it puts in computes something else than the same files
# loaded do, also where both adapters have the same config. No error, no warning. (It looks the
# patterns up by the names of tensors, as "up.lora_A.default.weight", and "up" never matches these.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 peft==0.21.2
cat > "$folder/program.py" <<'PROGRAM'
import copy
import sys
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter

torch.manual_seed(0)
base = torch.nn.Sequential()
base.add_module("down", torch.nn.Linear(8, 8))
base.add_module("up", torch.nn.Linear(8, 8))
inputs = torch.randn(16, 8)


def save_adapter(folder, patterns):
    """Save an adapter that has learned something."""
    config = LoraConfig(r=4, lora_alpha=4, target_modules=["down", "up"], **patterns)
    model = get_peft_model(copy.deepcopy(base), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data)
    model.save_pretrained(folder)


def load_adapter(folder):
    return PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()


def compare(patterns):
    """Return the second adapter's scales and outputs: loaded, then swapped in for the first."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        save_adapter(first, patterns)
        save_adapter(second, patterns)
        loaded, swapped = load_adapter(second), load_adapter(first)
        hotswap_adapter(swapped, second, adapter_name="default")
        results = []
        for model in (loaded, swapped):
            layers = (model.base_model.model.down, model.base_model.model.up)
            results.append(([layer.scaling["default"] for layer in layers], model(inputs)))
        return results


is_as_described = True
for patterns, expected in (
    ({}, ([1.0, 1.0], [1.0, 1.0])),
    ({"rank_pattern": {"up": 2}}, ([1.0, 2.0], [1.0, 1.0])),
    ({"alpha_pattern": {"up": 12}}, ([1.0, 3.0], [1.0, 1.0])),
):
    (loaded, of_loaded), (swapped, of_swapped) = compare(patterns)
    difference = (of_swapped - of_loaded).abs().max().item()
    print(f"r=4, lora_alpha=4, {patterns or 'no pattern'}")
    print(f"    scales of down and up: loaded {loaded}, swapped in {swapped}")
    print(f"    the outputs are at most {difference:.3f} apart")
    is_as_described &= (loaded, swapped) == expected
    is_as_described &= difference > 0.1 if patterns else difference == 0
sys.exit(0 if is_as_described else "hotswap_adapter no longer leaves the patterns out of the scale")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
