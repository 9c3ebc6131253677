#!/usr/bin/env bash
# transformers 5.24.0: Jamba, FalconMamba and Mamba called with a cache and several new tokens, as
# to score continuations of a prompt that was read once, start their recurrence at zero, not at the
# state in the cache, and put the new state in its place: what was read before is forgotten, also
# for later tokens. The same tokens one at a time, as in generate(), are right. No error, no
# warning; Mamba2 is right both ways.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

PROMPT, LENGTH = 5, 12
shape = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}
MODELS = (
    (Mamba2ForCausalLM, Mamba2Config(**shape, state_size=8, num_heads=8, head_dim=8, n_groups=2)),
    (MambaForCausalLM, MambaConfig(**shape, state_size=8)),
    (FalconMambaForCausalLM, FalconMambaConfig(**shape, state_size=8)),
    (
        JambaForCausalLM,
        JambaConfig(
            **shape, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
            attn_layer_period=2, attn_layer_offset=1, num_experts=1, num_experts_per_tok=1,
            mamba_d_state=8, mamba_dt_rank=4,
        ),
    ),
)
torch.manual_seed(0)
ids = torch.randint(1, 64, (2, LENGTH))
is_as_described = True
for model_class, config in MODELS:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)  # the logits of fresh models are small

        def continued(ids, size):
            """Return the logits after the prompt, read first, ``size`` tokens at a time."""
            cache = model(ids[:, :PROMPT], use_cache=True).cache
            parts = [*ids[:, PROMPT:-1].split(size, 1), ids[:, -1:]]
            return torch.cat([model(part, cache=cache, use_cache=True).logits for part in parts], 1)

        whole = model(ids, use_cache=False).logits[:, PROMPT:]
        together = (continued(ids, LENGTH) - whole).abs().amax((0, 2))
        singly = (continued(ids, 1) - whole).abs().max().item()
    print(f"{model_class.__name__}: logits after a cached prompt, up to {whole.abs().max():.2f}")
    print(f"    one token at a time: at most {singly:.6f} from those of the whole sequence")
    print(f"    all together:        at most {together[:-1].max():.6f}, and a last one after them")
    print(f"                         alone {together[-1]:.6f}")
    is_as_described &= singly < 1e-3
    if model_class is Mamba2ForCausalLM:
        is_as_described &= together.max().item() < 1e-3
    else:
        is_as_described &= together[:-1].max().item() > 0.02 and together[-1].item() > 1e-3
sys.exit(0 if is_as_described else "cached tokens are now read the same way together as singly")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
