#!/usr/bin/env bash
# adapters 1.3.0: reset_adapter() does not take a merged DoRA adapter out of the weights: it
# computes the original ones, forgets to store them, and deletes its copy of them. The model is then
# taken for unmerged: without an active adapter it is not the base model any more, with the adapter
# active it is applied to the merged weights, and merge_adapter() merges it once more. LoRA comes
# out exactly.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==4.57.6 \
    adapters==1.3.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import adapters
import torch
from adapters import DoRAConfig, LoRAConfig
from transformers import LlamaConfig, LlamaModel
from transformers.utils import logging

logging.set_verbosity_error()
ids = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(0))


def make(config):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    model = LlamaModel(LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes))
    adapters.init(model)
    model.add_adapter("learned", config=config)
    for name, parameter in model.named_parameters():
        if name.endswith((".lora_A", ".lora_B")):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


@torch.no_grad()
def outputs(model):
    return model(ids).last_hidden_state.clone()


def distance(left, right):
    return (left - right).abs().max().item()


is_as_described = True
for config in (LoRAConfig(r=8, alpha=8), DoRAConfig(r=8, alpha=8)):
    model = make(config)
    model = make(config)
    base = outputs(model)
    model.set_active_adapters("learned")
    adapted = outputs(model)
    model.merge_adapter("learned")
    merged = outputs(model)
    model.reset_adapter()
    adapted_after = outputs(model)
    model.merge_adapter("learned")
    merged_again = outputs(model)
    model.set_active_adapters(None)  # this calls reset_adapter() too
    base_after = outputs(model)
    print(f"{type(config).__name__}, which changes outputs by up to {distance(base, adapted):.4f}")
    print(f"    merged:                   {distance(merged, adapted):.6f} from active")
    print(f"    reset, active:            {distance(adapted_after, adapted):.6f} from before")
    print(f"    merged once more:         {distance(merged_again, merged):.6f} from the first time")
    print(f"    reset, none active:       {distance(base_after, base):.6f} from the base model's")
    is_as_described &= distance(merged, adapted) < 1e-4
    if isinstance(config, DoRAConfig):
        is_as_described &= distance(base_after, base) > 0.01
        is_as_described &= distance(adapted_after, adapted) > 0.01
        is_as_described &= distance(merged_again, merged) > 0.01
    else:
        is_as_described &= distance(base_after, base) < 1e-4
        is_as_described &= distance(adapted_after, adapted) < 1e-4
        is_as_described &= distance(merged_again, merged) < 1e-4
sys.exit(0 if is_as_described else "a merged DoRA adapter is now taken out again")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
