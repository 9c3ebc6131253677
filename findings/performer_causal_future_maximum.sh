#!/usr/bin/env bash
# performer-pytorch 1.1.4: causal attention (FastAttention and PerformerLM with causal=True) depends
# on later tokens. To keep the exponentials of the keys finite it subtracts the largest exponent of
# the whole sequence and then adds a constant of 1e-4, so that one large key at the end turns the
# weights of all positions before it into that constant. So what a position gets in training is not
# what it gets in generation. No error, no warning; with generalized_attention=True it is causal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 performer-pytorch==1.1.4
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from performer_pytorch import FastAttention

torch.set_num_threads(1)
torch.manual_seed(0)
query, key, value = [torch.randn(1, 1, 64, 32, dtype=torch.float64) / 2 for _ in range(3)]

is_as_described = True
for generalized in (True, False):
    attention = FastAttention(
        dim_heads=32, nb_features=256, causal=True, generalized_attention=generalized
    ).double()
    print(f"generalized_attention={generalized}; the outputs of positions 0 to 31,", end=" ")
    outputs = attention(query, key, value)[:, :, :32]
    print(f"{outputs.abs().max().item():.2f} at most, change by up to")
    prefix = attention(query[:, :, :32], key[:, :, :32], value[:, :, :32])
    change = (prefix - outputs).abs().max().item()
    print(f"    {change:.1e} without the positions after them")
    is_as_described &= (change < 1e-12) if generalized else (change > 1e-4)
    for factor in (2, 4):
        later = key.clone()
        later[:, :, -1] *= factor
        change = (attention(query, later, value)[:, :, :32] - outputs).abs().max().item()
        print(f"    {change:.1e} if the key of position 63 alone is {factor} times as large")
        is_as_described &= (change < 1e-12) if generalized else (change > 1e-4 or factor == 2)
    is_as_described &= generalized or change > 0.1
sys.exit(0 if is_as_described else "Performer's causal attention no longer sees later keys")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
