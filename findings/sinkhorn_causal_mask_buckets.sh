#!/usr/bin/env bash
# sinkhorn-transformer 0.11.4: causal attention with n_top_buckets other than 2 (1 is the default of
# SinkhornTransformer) sums up values of masked tokens. It puts n_top_buckets empty buckets before
# those that it sorts, but always 2 before their masks, so each sorted bucket goes with the mask of
# another one; tokens that are not masked get lost likewise. No error, no warning. With
# n_top_buckets=2 values of masked tokens have no effect.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 sinkhorn-transformer==0.11.4 \
    local-attention==1.11.2 product-key-memory==0.3.0
cat > "$folder/program.py" <<'PROGRAM'
import inspect
import sys

import torch
from sinkhorn_transformer import SinkhornTransformer
from sinkhorn_transformer.sinkhorn_transformer import SinkhornCausalAttention

BUCKET, BUCKETS, HEADS, DIM = 4, 8, 4, 8
LENGTH = BUCKET * BUCKETS
default = inspect.signature(SinkhornTransformer).parameters["n_top_buckets"].default
print(f"SinkhornTransformer has n_top_buckets={default} by default")
is_as_described = default == 1
for n_top_buckets in (1, 2, 3):
    torch.manual_seed(0)
    attention = SinkhornCausalAttention(
        bucket_size=BUCKET, dim=HEADS * DIM, dim_heads=DIM, heads=HEADS, max_seq_len=LENGTH,
        n_top_buckets=n_top_buckets,
    ).double()
    q, k, v = torch.randn(3, 4, HEADS, LENGTH, DIM, dtype=torch.float64).unbind()
    changes = []
    for masked in range(BUCKETS):
        mask = torch.arange(LENGTH) // BUCKET != masked
        others = torch.where(mask[:, None], v, torch.randn_like(v))
        outputs = [
            attention(q, k, values, q_mask=mask.expand(4, -1), kv_mask=mask.expand(4, -1))
            for values in (v, others)
        ]
        changes.append((outputs[0] - outputs[1])[:, :, mask].abs().max().item())
    print(f"{n_top_buckets=}: values of a masked bucket change outputs of other tokens by", end=" ")
    print("up to", " ".join(f"{change:.2f}" for change in changes))
    is_as_described &= max(changes) < 1e-9 if n_top_buckets == 2 else max(changes) > 0.1
sys.exit(0 if is_as_described else "masks now go with their buckets")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
