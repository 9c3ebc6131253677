#!/usr/bin/env bash
# torchtune 0.6.1: DoRALinear multiplies the bias of its base layer by magnitude / norm, as it does
# the weight. get_merged_lora_ckpt, which recipes save with, scales the weight alone (as the paper
# and peft do). So a model with biases, as Qwen2 and Qwen2.5 have in their attention, computes
# something else after merging than what was trained: the more, the further magnitudes have moved.
# No error, no warning; Llama, without biases, merges right, and so does LoRA of both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchtune==0.6.1 torchao==0.9.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys

import torch
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.models.qwen2 import lora_qwen2, qwen2
from torchtune.modules.peft import get_adapter_params, get_merged_lora_ckpt, set_trainable_params

logging.disable()
torch.set_num_threads(1)
RANK, ALPHA = 4, 8.0
SIZES = {
    "vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32,
    "intermediate_dim": 64, "max_seq_len": 32,
}
LORA = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj"], "apply_lora_to_mlp": True,
    "lora_rank": RANK, "lora_alpha": ALPHA,
}


def merge_error(base_builder, lora_builder, use_dora):
    """Return how far merging and training move the logits."""
    torch.manual_seed(0)
    model = lora_builder(**SIZES, **LORA, use_dora=use_dora)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter.data)
    for module in model.modules():
        if hasattr(module, "initialize_dora_magnitude"):
            module.initialize_dora_magnitude()
    tokens = torch.randint(SIZES["vocab_size"], (8, 16))
    with torch.no_grad():
        before = model(tokens)
    set_trainable_params(model, get_adapter_params(model))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        logits = model(tokens)[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    merged = base_builder(**SIZES)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged.load_state_dict(get_merged_lora_ckpt(weights, RANK, ALPHA))
    with torch.no_grad():
        trained = model(tokens)
        error = (merged(tokens) - trained).abs().max().item()
    return error, (trained - before).abs().max().item()


is_as_described = True
for name, builders in (("Llama 3", (llama3, lora_llama3)), ("Qwen2", (qwen2, lora_qwen2))):
    for use_dora in (False, True):
        error, moved = merge_error(*builders, use_dora)
        print(f"{name:7} {'DoRA' if use_dora else 'LoRA'}: training moved logits by up to", end=" ")
        print(f"{moved:.2f}, merging by up to {error:.6f}")
        if name == "Qwen2" and use_dora:
            is_as_described &= error > 0.1
        else:
            is_as_described &= error < 1e-3
sys.exit(0 if is_as_described else "a DoRA of layers with a bias now merges right")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
