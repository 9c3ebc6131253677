#!/usr/bin/env bash
# peft 0.21.2: of two OFT adapters on an nn.Linear that are active together, forward applies the
# first to the inputs first, and merge_and_unload() the second. Rotations do not commute, so the
# merged layer computes something else; it agrees with the two activated in the other order. No
# error, no warning. One OFT adapter, and two of HRA (not commuting either), merge right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 peft==0.21.2
cat > "$folder/program.py" <<'PROGRAM'
import copy
import sys

import torch
from peft import HRAConfig, OFTConfig, get_peft_model

torch.manual_seed(0)
base = torch.nn.Sequential(torch.nn.Linear(8, 12))
inputs = torch.randn(16, 8)


def model_of(config):
    """Return a model with the adapters "one" and "two", which have learned something."""
    model = get_peft_model(copy.deepcopy(base), config, adapter_name="one")
    model.add_adapter("two", config)
    for name, parameter in model.named_parameters():
        if ".one" in name or ".two" in name:
            torch.nn.init.normal_(parameter.data, std=0.5)
    return model.eval()


@torch.no_grad()
def outputs(model, active, is_merged):
    model = copy.deepcopy(model)
    model.base_model.set_adapter(active)
    return (model.merge_and_unload() if is_merged else model)(inputs)


def distance(left, right):
    return (left - right).abs().max().item()


is_as_described = True
for config in (
    HRAConfig(r=4, target_modules=["0"]),
    OFTConfig(r=0, oft_block_size=4, target_modules=["0"]),
):
    model = model_of(config)
    forward = outputs(model, ["one", "two"], False)
    alone = distance(outputs(model, ["one"], True), outputs(model, ["one"], False))
    both = distance(outputs(model, ["one", "two"], True), forward)
    swapped = distance(outputs(model, ["two", "one"], True), forward)
    print(f"{config.peft_type.value}: outputs of one, then two, up to {forward.abs().max():.3f}")
    print(f"    one alone, merged:    at most {alone:.6f} from its own outputs")
    print(f"    one and two, merged:  at most {both:.6f} from these")
    print(f"    two and one, merged:  at most {swapped:.6f} from these")
    right, wrong = (swapped, both) if isinstance(config, OFTConfig) else (both, swapped)
    is_as_described &= alone < 1e-5 and right < 1e-5 and wrong > 0.1
sys.exit(0 if is_as_described else "OFT no longer merges two adapters in the reverse order")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
