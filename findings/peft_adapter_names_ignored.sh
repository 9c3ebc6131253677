#!/usr/bin/env bash
# peft 0.21.2: adapter_names, which lets each row of a batch use another adapter, works for LoRA. A
# model with IA3, LoHa, OFT, VeRA, HiRA or most other adapters takes it too, and ignores it: every
# row is computed with the active adapter, also where a name does not exist. No error, no warning of
# it. LoRA's rows equal those of one adapter at a time, and an unknown name is an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 peft==0.21.2
cat > "$folder/program.py" <<'PROGRAM'
import copy
import sys

import torch
from peft import (
    HiraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,
    )
)
ids = torch.randint(64, (3, 6))
NAMES = ["one", "two", "__base__"]
targets = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}


def adapted(config):
    """Return a model with the adapters "one", which is active, and "two", both of them trained."""
    model = get_peft_model(copy.deepcopy(base), config, adapter_name="one")
    model.add_adapter("two", config)
    for name, parameter in model.named_parameters():
        if ".one" in name or ".two" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


@torch.no_grad()
def row_alone(model, row, name):
    """Return the logits of a row, with one adapter for the whole call."""
    if name == "__base__":
        with model.disable_adapter():
            return model(input_ids=ids[row : row + 1]).logits[0]
    model.set_adapter(name)
    logits = model(input_ids=ids[row : row + 1]).logits[0]
    model.set_adapter("one")
    return logits


def difference(left, right):
    return (left - right).abs().max().item()


is_as_described = True
for config in (
    LoraConfig(r=4, **targets),
    IA3Config(feedforward_modules=[], **targets),
    LoHaConfig(r=4, **targets),
    OFTConfig(r=0, oft_block_size=4, **targets),
    VeraConfig(r=4, **targets),
    HiraConfig(r=4, **targets),
):
    torch.manual_seed(0)
    model = adapted(config)
    with torch.no_grad():
        mixed = model(input_ids=ids, adapter_names=NAMES).logits
        without = model(input_ids=ids).logits
        try:
            model(input_ids=ids, adapter_names=["no-such-name"] * 3)
            unknown = "accepted"
        except ValueError:
            unknown = "refused"
    print(f"{config.peft_type.value}, adapter_names={NAMES}; an unknown name is {unknown}")
    print(f"    logits with and without adapter_names: {difference(mixed, without):.6f} apart")
    errors = []
    for row, name in enumerate(NAMES):
        errors.append(difference(mixed[row], row_alone(model, row, name)))
        print(f"    row {row} and that of {name!r} alone: {errors[-1]:.6f} apart")
    if isinstance(config, LoraConfig):
        is_as_described &= max(errors) < 1e-5 and unknown == "refused"
    else:
        is_as_described &= difference(mixed, without) == 0 and unknown == "accepted"
        is_as_described &= errors[0] < 1e-5 and min(errors[1:]) > 1e-3
sys.exit(0 if is_as_described else "these adapters no longer ignore adapter_names")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
