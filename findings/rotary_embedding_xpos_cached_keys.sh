#!/usr/bin/env bash
# rotary-embedding-torch 0.9.1: rotate_queries_with_cached_keys, for inference with a cache, takes
# xpos too. It scales queries and keys by powers that it counts from the middle of what it is given,
# for fewer queries than keys from two middles. So the scores of a new token are not those of the
# same tokens by rotate_queries_and_keys, the more so the longer the cache, and differently in each
# feature. No error, no warning; for as many queries as keys, and without xpos, they are.
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
DIM = 32
torch.manual_seed(0)
all_queries, all_keys = torch.randn(2, 2, 4, 1024, DIM)

is_as_described = True
for use_xpos in (False, True):
    for length, new in ((64, 64), (64, 1), (256, 1), (1024, 1), (1024, 16)):
        rotary = RotaryEmbedding(dim=DIM, use_xpos=use_xpos)
        queries, keys = all_queries[:, :, :length], all_keys[:, :, :length]
        if use_xpos:
            expected, rotated_keys = rotary.rotate_queries_and_keys(queries, keys)
        else:
            expected = rotary.rotate_queries_or_keys(queries)
            rotated_keys = rotary.rotate_queries_or_keys(keys)
        expected = expected[:, :, -new:] @ rotated_keys.mT
        scores, rotated_keys = rotary.rotate_queries_with_cached_keys(queries[:, :, -new:], keys)
        scores = scores @ rotated_keys.mT
        error = ((scores - expected).norm() / expected.norm()).item()
        print(f"{use_xpos=}, {new} queries of {length}: the scores are off by {error:.2%}")
        is_as_described &= (error > 0.02) if use_xpos and new < length else (error < 1e-5)
is_as_described &= error > 0.3
sys.exit(0 if is_as_described else "queries and cached keys are now scaled from the same middle")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
