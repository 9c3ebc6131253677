#!/usr/bin/env bash
# rotary-embedding-torch 0.9.1: rotate_queries_or_keys counts positions in the type of its input. In
# bf16 there are no odd numbers beyond 256, nor other than each 32nd beyond 4096, so that tokens get
# the rotation of another position, and neighbours the same one. fp16 is so beyond 2048. It keeps
# these rotations for later inputs, also in fp32. No error, no warning; in fp32 alone it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 rotary-embedding-torch==0.9.1
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from rotary_embedding_torch import RotaryEmbedding

torch.set_num_threads(1)
DIM, LENGTH = 32, 5000

angles = torch.arange(LENGTH, dtype=torch.float64)[:, None]
angles = angles * 10000 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
expected = torch.stack([angles.cos() - angles.sin(), angles.cos() + angles.sin()], dim=-1)
expected = expected.flatten(-2)

is_as_described = True
ones = torch.ones(1, 1, LENGTH, DIM)
for first in (torch.float32, torch.float16, torch.bfloat16):
    rotary = RotaryEmbedding(dim=DIM, cache_max_seq_len=LENGTH)
    digit = torch.finfo(first).eps
    for dtype in dict.fromkeys((first, torch.float32)):
        rotated = rotary.rotate_queries_or_keys(ones.to(dtype))[0, 0]
        errors = (rotated.double() - expected).abs().amax(-1)
        name, after = str(dtype)[6:], f" after {str(first)[6:]}" if dtype != first else ""
        print(f"{name}{after}: largest error at positions 0 to 255 {errors[:256].max():.1e},")
        print(f"    256 to 2047 {errors[256:2048].max():.1e}", end=", ")
        print(f"from 2048 on {errors[2048:].max():.1e}")
        is_as_described &= errors[:256].max().item() < max(4 * digit, 1e-3)
        is_as_described &= (errors[256:2048].max().item() > 0.5) == (first == torch.bfloat16)
        is_as_described &= (errors[2048:].max().item() > 0.5) == (first != torch.float32)
    if first == torch.bfloat16:
        same = (rotated[1:] == rotated[:-1]).all(-1)
        print(f"    {same[256:].float().mean():.0%} of those from 256 on are rotated like the next")
        is_as_described &= same[256:].float().mean().item() > 0.8 and not same[:256].any()
sys.exit(0 if is_as_described else "positions are no longer counted in the type of the input")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
