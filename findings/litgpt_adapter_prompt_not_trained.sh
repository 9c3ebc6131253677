#!/usr/bin/env bash
# litgpt 0.5.13: the adapter's attention keeps keys and values of its prompt, computed in the first
# forward, for all later ones, in training too. Both finetune_adapter recipes first validate,
# without gradients. So adapter_wte, the prompt itself, gets no gradient and is never trained, only
# the gates are (and norms, scales and biases in Adapter V2). No error, no warning; if the first
# forward is one of training, the second backward raises. (The authors know it and have not mended
# it in this version.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 litgpt==0.5.13
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch

warnings.filterwarnings("ignore")
from litgpt import adapter, adapter_v2  # noqa: E402

torch.set_num_threads(1)


def train(library, mark_only_adapter_as_trainable, is_cache_dropped):
    """Return the prompt's gradient in the last step, how far it moved, and the last loss."""
    torch.manual_seed(0)
    config = library.Config(
        n_layer=3, n_head=4, n_embd=32, padded_vocab_size=64, block_size=64,
        adapter_prompt_length=5, adapter_start_layer=1,
    )
    model = library.GPT(config)
    mark_only_adapter_as_trainable(model)
    tokens = torch.randint(64, (4, 16))
    with torch.no_grad():  # as validate() of the recipes
        model(tokens)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    prompt = model.transformer.h[2].attn.adapter_wte.weight
    before = prompt.detach().clone()
    for _ in range(100):
        optimizer.zero_grad()
        if is_cache_dropped:
            for block in model.transformer.h[1:]:
                block.attn.adapter_kv_cache = None
        logits = model(tokens)[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    gradient = None if prompt.grad is None else prompt.grad.abs().max().item()
    return gradient, (prompt - before).abs().max().item(), loss.item()


is_as_described = True
for library, mark in (
    (adapter, adapter.mark_only_adapter_as_trainable),
    (adapter_v2, adapter_v2.mark_only_adapter_v2_as_trainable),
):
    for is_cache_dropped in (True, False):
        gradient, moved, loss = train(library, mark, is_cache_dropped)
        how = "its cache is dropped in each step" if is_cache_dropped else "as it is"
        print(f"{library.__name__}, {how}: 100 steps moved the prompt by up to {moved:.3f};")
        print(f"    its last gradient is {gradient}; loss {loss:.3f}")
        if is_cache_dropped:
            is_as_described &= gradient is not None and moved > 0.05
        else:
            is_as_described &= gradient is None and moved == 0
sys.exit(0 if is_as_described else "the adapter's prompt is trained")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
