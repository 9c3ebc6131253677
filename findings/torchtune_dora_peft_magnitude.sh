#!/usr/bin/env bash
# torchtune 0.6.1: tune_to_peft_adapter_weights, which the checkpointer saves adapters in peft's
# format with, reorders the rows of lora_B of a Llama's queries and keys, as Hugging Face has them
# in another order. DoRA's magnitudes, one for each row, it leaves as they are. So rows of these get
# the magnitudes of others, and the adapter, loaded with peft, is not what was trained, also right
# after it was made. No error, no warning; values are right, and the merged model is. (Recipes do
# not save use_dora in the adapter's config either; the program applies DoRA's formula itself.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchtune==0.6.1 torchao==0.9.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys

import torch
from torchtune.models.convert_weights import tune_to_hf, tune_to_peft_adapter_weights
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.modules.peft import get_adapter_state_dict, get_merged_lora_ckpt

logging.disable()
torch.manual_seed(0)
RANK, ALPHA = 4, 8.0
ARGUMENTS = {"num_heads": 4, "num_kv_heads": 2, "dim": 32}
SIZES = {
    "vocab_size": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32,
    "intermediate_dim": 64, "max_seq_len": 32,
}
PROJECTIONS = ["q_proj", "k_proj", "v_proj"]
base = llama3(**SIZES)
model = lora_llama3(
    **SIZES, lora_attn_modules=PROJECTIONS, lora_rank=RANK, lora_alpha=ALPHA, use_dora=True
)
model.load_state_dict(base.state_dict(), strict=False)
for module in model.modules():
    if hasattr(module, "initialize_dora_magnitude"):
        module.weight.data *= torch.linspace(0.5, 2.0, len(module.weight)).view(-1, 1)
        module.initialize_dora_magnitude()
base.load_state_dict({k: v for k, v in model.state_dict().items() if k in base.state_dict()})
base_in_hf = tune_to_hf(base.state_dict(), **ARGUMENTS)


def errors():
    """Return how far base weight + adapter, by DoRA's formula, is from the merged weight."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = tune_to_hf(get_merged_lora_ckpt(weights, RANK, ALPHA), **ARGUMENTS)
    adapter = tune_to_peft_adapter_weights(get_adapter_state_dict(model.state_dict()), **ARGUMENTS)
    found = {}
    for projection in PROJECTIONS:
        name = f"model.layers.0.self_attn.{projection}"
        a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        magnitude = adapter[f"base_model.model.{name}.lora_magnitude_vector"]
        direction = base_in_hf[f"{name}.weight"] + ALPHA / RANK * b @ a
        by_adapter = direction * (magnitude / direction.norm(dim=1)).view(-1, 1)
        found[projection] = (by_adapter - merged[f"{name}.weight"]).abs().max().item()
    return found


is_as_described = True
for label in ("as it was made", "with random lora_B and magnitudes, as if trained"):
    if label != "as it was made":
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                torch.nn.init.normal_(parameter.data)
            if "magnitude" in name:
                parameter.data *= 0.5 + torch.rand_like(parameter)
    found = errors()
    print(f"DoRA of Llama 3, {label}: weights by the adapter for peft and merged weights differ by")
    print("    " + ", ".join(f"{error:.6f} in {name}" for name, error in found.items()))
    is_as_described &= min(found["q_proj"], found["k_proj"]) > 0.01 and found["v_proj"] < 1e-4
sys.exit(0 if is_as_described else "magnitudes are reordered like the rows of lora_B")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
