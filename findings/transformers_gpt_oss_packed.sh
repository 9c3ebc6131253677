#!/usr/bin/env bash
# transformers 5.24.0: of two sequences packed in one row, with position_ids that begin at 0 again,
# GPT-OSS (with eager attention, its default here) lets the second attend to the first, so its
# logits, loss and gradients depend on what it is packed with. Llama and Qwen3-MoE keep sequences
# apart, as create_causal_mask does if it is given position_ids; GPT-OSS, and AFMoE, pass none. No
# error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

shape = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}
experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = (
    (LlamaForCausalLM, LlamaConfig(**shape), False),
    (Qwen3MoeForCausalLM, Qwen3MoeConfig(**shape, **experts, num_experts=4), False),
    (GptOssForCausalLM, GptOssConfig(**shape, num_experts_per_tok=2, num_local_experts=4), True),
    (AfmoeForCausalLM, AfmoeConfig(**shape, **experts, num_experts=4), True),
)


def packed_logits(model, first, second):
    """Return the logits of the second sequence, which comes after the first in one row."""
    positions = torch.cat([torch.arange(len(first)), torch.arange(len(second))])
    ids = torch.cat([first, second])
    output = model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    return output.logits[0, len(first) :]


torch.manual_seed(0)
first, other, second = torch.randint(64, (3, 8))
is_as_described = True
for model_class, config, leaks in MODELS:
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # the logits of fresh models are small
        alone = model(input_ids=second[None], use_cache=False).logits[0]
        packed = packed_logits(model, first, second)
        packed_with_other = packed_logits(model, other, second)
    by_packing = (packed - alone).abs().max().item()
    by_first = (packed_with_other - packed).abs().max().item()
    print(f"{model_class.__name__}: logits of the second sequence, up to {alone.abs().max():.2f}")
    print(f"    change by up to {by_packing:.4f} if it is packed after another sequence,")
    print(f"    and by up to {by_first:.4f} if that is replaced by a third")
    if leaks:
        is_as_described &= min(by_packing, by_first) > 0.1
    else:
        is_as_described &= by_packing < 1e-4 and by_first == 0
sys.exit(0 if is_as_described else "the models that keep packed sequences apart have changed")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
