#!/usr/bin/env bash
# peft 0.21.2: of two C3A adapters that are active together, forward applies the second to the
# output of the first, not to the input of the layer. merge_and_unload() adds both to the weight, so
# the merged layer computes something else, as does the other order. No error, no warning (where the
# sizes of input and output differ, an error). One C3A adapter, and two of LoRA, merge right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 peft==0.21.2
cat > "$folder/program.py" <<'PROGRAM'
import copy
import sys

import torch
from peft import C3AConfig, LoraConfig, get_peft_model

torch.manual_seed(0)
base = torch.nn.Sequential(torch.nn.Linear(16, 16))
inputs = torch.randn(32, 16)


def distance(left, right):
    return (left - right).abs().max().item()


@torch.no_grad()
def outputs(model, active, is_merged=False):
    model = copy.deepcopy(model)
    model.base_model.set_adapter(active)
    return (model.merge_and_unload() if is_merged else model)(inputs)


is_as_described = True
for config in (
    LoraConfig(r=4, target_modules=["0"]),
    C3AConfig(block_size=8, target_modules=["0"]),
):
    model = get_peft_model(copy.deepcopy(base), config, adapter_name="one")
    model.add_adapter("two", config)
    for name, parameter in model.named_parameters():
        if ".one" in name or ".two" in name:
            torch.nn.init.normal_(parameter.data)
    model.eval()
    both = outputs(model, ["one", "two"])
    with torch.no_grad():
        of_base = base(inputs)
        one, two = (outputs(model, [name]) - of_base for name in ("one", "two"))
    alone = distance(outputs(model, ["one"], is_merged=True), of_base + one)
    errors = {
        "the base's and what each adds alone": distance(both, of_base + one + two),
        "those merged": distance(both, outputs(model, ["one", "two"], is_merged=True)),
        "those of two, then one": distance(both, outputs(model, ["two", "one"])),
    }
    merged_error = distance(outputs(model, ["one", "two"], is_merged=True), of_base + one + two)
    print(f"{config.peft_type.value}, one, then two: outputs, up to {both.abs().max():.2f}, differ")
    for name, error in errors.items():
        print(f"    from {name} by up to {error:.6f}")
    print(f"    (one alone and merged: {alone:.6f}; both merged from what each adds:", end=" ")
    print(f"{merged_error:.6f})")
    is_as_described &= max(alone, merged_error) < 1e-4
    if isinstance(config, C3AConfig):
        is_as_described &= min(errors.values()) > 0.1
    else:
        is_as_described &= max(errors.values()) < 1e-4
sys.exit(0 if is_as_described else "two C3A adapters no longer depend on each other")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
