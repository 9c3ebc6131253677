#!/usr/bin/env bash
# transformers 5.24.0: RecurrentGemma hands attention_mask to its attention layers alone. Its
# recurrent layers read padding on the left, as a batch of prompts has and its tokenizer puts it,
# like text. So logits and generated tokens depend on how long the padding is, and on what ids it
# has. No error, no warning; Llama's and Mamba's do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    logging,
)

logging.set_verbosity_error()  # of kernels that are not installed
PAD, OTHER_PAD, NEW_TOKENS = 0, 7, 10
shape = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "pad_token_id": PAD,
    "bos_token_id": None, "eos_token_id": None,
}
heads = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = (
    (LlamaForCausalLM, LlamaConfig(**shape, **heads), False),
    (MambaForCausalLM, MambaConfig(**shape, state_size=8), False),
    (
        RecurrentGemmaForCausalLM,
        RecurrentGemmaConfig(**shape, **heads, lru_width=32, attention_window_size=64),
        True,
    ),
)
torch.manual_seed(0)
short, long = torch.randint(8, 64, (1, 7)), torch.randint(8, 64, (1, 12))


def batch_of(pad):
    """Return the short prompt, padded on the left, and the long one, with their mask."""
    missing = long.shape[1] - short.shape[1]
    ids = torch.cat([torch.nn.functional.pad(short, (missing, 0), value=pad), long])
    mask = torch.ones_like(ids)
    mask[0, :missing] = 0
    return ids, mask


def last_logits(model, ids, mask):
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    options = {} if isinstance(model, MambaForCausalLM) else {"position_ids": positions}
    return model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits[:, -1]


def generate(model, ids, mask):
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=PAD
    )
    return output[:, ids.shape[1] :]


is_as_described = True
for model_class, config, reads_padding in MODELS:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "A_log" not in name:
                torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
        alone = [last_logits(model, ids, torch.ones_like(ids))[0] for ids in (short, long)]
        batch, other = last_logits(model, *batch_of(PAD)), last_logits(model, *batch_of(OTHER_PAD))
        new = generate(model, *batch_of(PAD))
        new_alone = [generate(model, ids, torch.ones_like(ids))[0] for ids in (short, long)]
    errors = [(batch[i] - alone[i]).abs().max().item() for i in range(2)]
    by_id = (other[0] - batch[0]).abs().max().item()
    kept = [(new[i] == new_alone[i]).sum().item() for i in range(2)]
    print(f"{model_class.__name__}: last logits, up to {alone[0].abs().max():.2f}, in a batch")
    print(f"    differ by {errors[0]:.5f} from those alone if padded, {errors[1]:.5f} if not,")
    print(f"    and by {by_id:.5f} if the padding has another id;")
    print(f"    {kept[0]} of {NEW_TOKENS} tokens generated after padding are those alone")
    is_as_described &= errors[1] < 1e-4 and kept[1] == NEW_TOKENS
    if reads_padding:
        is_as_described &= errors[0] > 0.1 and by_id > 0.1 and kept[0] < NEW_TOKENS
    else:
        is_as_described &= errors[0] < 1e-4 and by_id < 1e-4 and kept[0] == NEW_TOKENS
sys.exit(0 if is_as_described else "RecurrentGemma no longer reads padding")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
