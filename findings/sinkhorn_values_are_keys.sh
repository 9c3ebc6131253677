#!/usr/bin/env bash
# sinkhorn-transformer 0.11.4: attention that is not causal takes, from the buckets that it sorts to
# a query's bucket, keys in place of values (without n_sortcut, 0 by default). So values never leave
# their own bucket: what a token's value says reaches no other bucket, and half of what is summed up
# are keys. No error, no warning. In the paper (Sparse Sinkhorn Attention, arXiv 2002.11296) keys
# and values are sorted alike, as they are with n_sortcut.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 sinkhorn-transformer==0.11.4 \
    local-attention==1.11.2 product-key-memory==0.3.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from sinkhorn_transformer.sinkhorn_transformer import SinkhornAttention

torch.manual_seed(0)
BUCKET, BUCKETS, HEADS, DIM = 4, 6, 3, 8
LENGTH = BUCKET * BUCKETS
q, k, v = torch.randn(3, 1, HEADS, LENGTH, DIM, dtype=torch.float64).unbind()


def attention_of(**options):
    return SinkhornAttention(
        bucket_size=BUCKET, dim=HEADS * DIM, dim_heads=DIM, heads=HEADS, max_seq_len=LENGTH,
        **options,
    )


def buckets_reached(attention, what):
    """Return how many other buckets' outputs a bucket's keys or values change, the mean."""
    count = 0
    for bucket in range(BUCKETS):
        changed = {"keys": k.clone(), "values": v.clone()}
        rows = slice(bucket * BUCKET, (bucket + 1) * BUCKET)
        # the sum of a bucket's keys decides how buckets are sorted: leave it as it is
        shift = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)[:, None]
        changed[what][:, :, rows] += shift
        outputs = []
        for keys, values in ((k, v), (changed["keys"], changed["values"])):
            torch.manual_seed(1)  # the same Gumbel noise
            outputs.append(attention(q, keys, values))
        change = (outputs[0] - outputs[1]).abs().amax((0, 1, 3)).view(BUCKETS, BUCKET).amax(-1)
        count += (change > 1e-9).sum().item() - (change[bucket] > 1e-9).item()
    return count / BUCKETS


is_as_described = True
for name, options in (
    ("permutations by Sinkhorn", {"non_permutative": False}),
    ("the best bucket of each", {"non_permutative": True}),
    ("n_sortcut=2", {"non_permutative": True, "n_sortcut": 2}),
):
    attention = attention_of(**options)
    reached = {what: buckets_reached(attention, what) for what in ("keys", "values")}
    print(f"{name}: a bucket's keys change {reached['keys']:.1f} other buckets' outputs,", end=" ")
    print(f"its values {reached['values']:.1f}")
    is_as_described &= reached["keys"] > 0.5
    is_as_described &= reached["values"] > 0.5 if "n_sortcut" in options else reached["values"] == 0

attention = attention_of(non_permutative=True)
found = attention(q, k, 0 * v)
print(f"with values of 0 everywhere outputs are up to {found.abs().max():.2f}")
is_as_described &= found.abs().max().item() > 0.1
sys.exit(0 if is_as_described else "sorted buckets now bring their values")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
