#!/usr/bin/env bash
# torchtune 0.6.1: the checkpointer also saves LoRA adapters in peft's format. There it reorders the
# rows of lora_B of queries and keys as Llama's rotary embedding needs, also for Qwen2 and Qwen2.5,
# whose weights torchtune keeps in Hugging Face's order. So an adapter of these, loaded with peft,
# has other queries and keys than were trained; the merged model that is saved beside it is right.
# No error, no warning; for Llama adapter and merged model are the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchtune==0.6.1 torchao==0.9.0
cat > "$folder/program.py" <<'PROGRAM'
import json
import logging
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torchtune.models.convert_weights import tune_to_hf
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.models.qwen2 import lora_qwen2, qwen2
from torchtune.modules.peft import get_adapter_state_dict, get_merged_lora_ckpt
from torchtune.training import FullModelHFCheckpointer

logging.disable()
RANK, ALPHA, HEADS, GROUPS, DIM = 4, 8.0, 4, 2, 32
SIZES = {
    "vocab_size": 64, "num_layers": 1, "num_heads": HEADS, "num_kv_heads": GROUPS,
    "embed_dim": DIM, "intermediate_dim": 64, "max_seq_len": 32,
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def qwen2_to_hf(weights):
    from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf

    return qwen2_tune_to_hf(weights, num_heads=HEADS, num_kv_heads=GROUPS, dim=DIM)


def llama_to_hf(weights):
    return tune_to_hf(weights, num_heads=HEADS, num_kv_heads=GROUPS, dim=DIM)


def errors(root, model_type, base_builder, lora_builder, to_hf):
    """Return how far base weight + adapter is from the merged weight, for each projection."""
    torch.manual_seed(0)
    base_folder, out = Path(root) / "base", Path(root) / "out"
    base_folder.mkdir()
    base = to_hf(base_builder(**SIZES).state_dict())
    save_file({k: v.contiguous() for k, v in base.items()}, base_folder / "model.safetensors")
    config = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "hidden_size": DIM}
    (base_folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    checkpointer = FullModelHFCheckpointer(
        str(base_folder), ["model.safetensors"], model_type=model_type, output_dir=str(out)
    )
    model = lora_builder(
        **SIZES, lora_attn_modules=list(PROJECTIONS), lora_rank=RANK, lora_alpha=ALPHA
    )
    model.load_state_dict(checkpointer.load_checkpoint()["model"], strict=False)
    for name, parameter in model.named_parameters():
        if "lora_b" in name:  # as if it were trained
            torch.nn.init.normal_(parameter.data)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapter_config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(PROJECTIONS)}
    states = {
        "model": get_merged_lora_ckpt(weights, RANK, ALPHA),
        "adapter": get_adapter_state_dict(model.state_dict()),
        "adapter_config": adapter_config,
    }
    checkpointer.save_checkpoint(states, epoch=0)
    adapter = load_file(out / "epoch_0" / "adapter_model.safetensors")
    merged = load_file(next((out / "epoch_0").glob("model-*.safetensors")))
    found = {}
    for projection in PROJECTIONS:
        name = f"model.layers.0.self_attn.{projection}"
        a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        by_adapter = base[f"{name}.weight"] + ALPHA / RANK * b @ a
        found[projection] = (by_adapter - merged[f"{name}.weight"]).abs().max().item()
    return found


is_as_described = True
for model_type, *parts in (
    ("LLAMA3", llama3, lora_llama3, llama_to_hf), ("QWEN2", qwen2, lora_qwen2, qwen2_to_hf)
):
    with tempfile.TemporaryDirectory() as root:
        found = errors(root, model_type, *parts)
    print(f"{model_type}: weights with the saved adapter and saved merged weights differ by up to")
    print("    " + ", ".join(f"{error:.6f} in {name}" for name, error in found.items()))
    for name, error in found.items():
        is_wrong = model_type == "QWEN2" and name != "v_proj"
        is_as_described &= error > 0.1 if is_wrong else error < 1e-4
sys.exit(0 if is_as_described else "the adapters of Qwen2 are saved as they are merged")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
