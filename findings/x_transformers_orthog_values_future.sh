#!/usr/bin/env bash
# x-transformers 2.31.10: a Decoder with attn_orthog_projected_values=True takes from each attention
# output the part along the values, but of the whole sequence as one vector. So every position
# depends on all later ones: the logits of a prefix are not those it has alone, and generation
# computes something else than training did. No error, no warning; without the option it is causal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 x-transformers==2.31.10
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from x_transformers import Decoder, TransformerWrapper

vocab_size, length, prefix = 32, 12, 6


def distance(left, right):
    return (left - right).abs().max().item()


torch.manual_seed(0)
ids = torch.randint(vocab_size, (1, length))
other = torch.cat([ids[:, :prefix], torch.randint(vocab_size, (1, length - prefix))], 1)
is_as_described = True
for options, leaks in (
    ({}, False),
    ({"attn_orthog_projected_values": True}, True),
    ({"attn_orthog_projected_values_per_head": True}, True),
):
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, **options)
    model = TransformerWrapper(num_tokens=vocab_size, max_seq_len=length, attn_layers=layers).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
        logits = model(ids)[:, :prefix]
        by_later_tokens = distance(model(other)[:, :prefix], logits)
        by_cutting = distance(model(ids[:, :prefix]), logits)
    print(f"Decoder({options}):")
    print(f"    logits of the first {prefix} tokens, up to {logits.abs().max():.2f},")
    print(f"    change by {by_later_tokens:.6f} if the {length - prefix} after them are others,")
    print(f"    and by {by_cutting:.6f} if none follow")
    changes = (by_later_tokens, by_cutting)
    is_as_described &= min(changes) > 0.01 if leaks else max(changes) < 1e-4
sys.exit(0 if is_as_described else "these decoders are causal")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
