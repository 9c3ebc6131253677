#!/usr/bin/env bash
# transformers 5.24.0: generate() with RWKV mixes the rows of a batch. From the second new token on
# the model reads one token and its state, whose shapes it combines so that the batch becomes the
# sequence as well: forward returns as many positions for this token as there are rows. So prompts
# of the same length, without padding, get other tokens in a batch than alone, or than with
# use_cache=False. No error, no warning; Mamba gives the same tokens all three ways.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from transformers import MambaConfig, MambaForCausalLM, RwkvConfig, RwkvForCausalLM

ROWS, LENGTH, NEW = 3, 12, 8
shape = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}
torch.manual_seed(0)
prompts = torch.randint(64, (ROWS, LENGTH))


def new_tokens(model, prompts, use_cache=True):
    tokens = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, do_sample=False,
        use_cache=use_cache,
    )
    return tokens[:, LENGTH:].tolist()


is_as_described = True
for model_class, config in (
    (MambaForCausalLM, MambaConfig(**shape)),
    (RwkvForCausalLM, RwkvConfig(**shape, context_length=64)),
):
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)  # the logits of fresh models are small
    alone = [new_tokens(model, prompt[None])[0] for prompt in prompts]
    in_batch = new_tokens(model, prompts)
    print(model_class.__name__)
    for row in range(ROWS):
        print(f"    prompt {row}: alone {alone[row]}, in the batch {in_batch[row]}")
    is_as_described &= new_tokens(model, prompts, use_cache=False) == alone
    is_rwkv = model_class is RwkvForCausalLM
    is_as_described &= (in_batch != alone) if is_rwkv else (in_batch == alone)
    if is_rwkv:
        is_as_described &= all(a[0] == b[0] for a, b in zip(alone, in_batch, strict=True))
        with torch.no_grad():
            state = model(prompts, use_cache=True).state
            shape_of_logits = tuple(model(prompts[:, -1:], state=state).logits.shape)
        print(f"    logits of one token for each of {ROWS} rows: {shape_of_logits}")
        is_as_described &= shape_of_logits == (ROWS, ROWS, 64)
sys.exit(0 if is_as_described else "RWKV no longer mixes the rows of a batch")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
