#!/usr/bin/env bash
# titans-pytorch 0.5.5: MemoryAsContextTransformer with neural_mem_weight_residual=True adds to the
# memory's weights of each segment those that the layer before had when the segment began. With a
# cache, as in sample(use_cache=True), it adds those that the layer before has when the segment has
# ended, for the second segment. So what it generates after that is not by the model that was
# trained, nor by that of use_cache=False. No error, no warning; without the option it is the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 titans-pytorch==0.5.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from titans_pytorch import MemoryAsContextTransformer

torch.set_num_threads(1)
PROMPT, SEGMENT, LENGTH = 4, 8, 40

is_as_described = True
for neural_mem_weight_residual in (False, True):
    torch.manual_seed(0)
    model = MemoryAsContextTransformer(
        num_tokens=50, dim=32, depth=3, dim_head=8, heads=2, segment_len=SEGMENT,
        num_persist_mem_tokens=2, num_longterm_mem_tokens=2, neural_memory_layers=(1, 2, 3),
        neural_mem_weight_residual=neural_mem_weight_residual,
    ).eval()
    prompt = torch.randint(0, 50, (4, PROMPT))
    print(f"{neural_mem_weight_residual=}: the new tokens of sample() at temperature 0 that are")
    print("    the likeliest of all by the logits of the whole sequence")
    for use_cache in (False, True):
        new = model.sample(
            prompt, LENGTH, temperature=0.0, use_cache=use_cache, show_progress=False
        )
        with torch.no_grad():
            logits = model(torch.cat([prompt, new], dim=1))[:, PROMPT - 1 : -1]
        behind = logits.amax(-1) - logits.gather(-1, new[..., None])[..., 0]
        likeliest = (behind < 1e-3).float().mean(0)
        early, late = likeliest[: 2 * SEGMENT - PROMPT], likeliest[2 * SEGMENT - PROMPT + 1 :]
        print(f"    {use_cache=}: {early.mean().item():.0%} in the first two segments,", end=" ")
        print(f"{late.mean().item():.0%} later; logits are up to {behind.max().item():.2f} behind")
        is_as_described &= early.mean().item() == 1
        if use_cache and neural_mem_weight_residual:
            is_as_described &= late.mean().item() < 0.9 and behind.max().item() > 0.1
        else:
            is_as_described &= late.mean().item() == 1
sys.exit(0 if is_as_described else "the cache no longer changes the weights of the layer before")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
