#!/usr/bin/env bash
# local-attention 1.11.2: LocalTransformer.generate caches keys, by default. A cached step rotates
# the keys of the cache by their positions and puts the rotated ones into the new cache, where the
# next step rotates them again. So from the third new token on it computes something else than it
# was trained on, and than use_kv_cache=False does. No error, no warning; with
# use_dynamic_pos_bias=True, which has no rotation, both ways are the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 local-attention==1.11.2
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from local_attention import LocalTransformer

torch.set_num_threads(1)
VOCAB_SIZE, PERIOD, PROMPT, NEW_TOKENS = 24, 5, 12, 20


def patterns(batch):
    """Return rows of five different random tokens that repeat."""
    return torch.rand(batch, VOCAB_SIZE).argsort(-1)[:, :PERIOD].repeat(1, 7)[:, :33]


is_as_described = True
for use_dynamic_pos_bias in (True, False):
    torch.manual_seed(0)
    model = LocalTransformer(
        num_tokens=VOCAB_SIZE, max_seq_len=32, dim=64, depth=2, heads=4, dim_head=16, causal=True,
        local_attn_window_size=8, use_dynamic_pos_bias=use_dynamic_pos_bias,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(500):
        optimizer.zero_grad()
        loss = model(patterns(32), return_loss=True)
        loss.backward()
        optimizer.step()
    model.eval()
    print(f"{use_dynamic_pos_bias=}, trained to a loss of {loss.item():.3f}")
    rows = patterns(50)[:, :32]
    with torch.no_grad():
        logits = model(rows)
        changes = []
        cache = model(rows[:, :PROMPT], return_cache=True)[1]
        for i in range(PROMPT, 32):
            step, cache = model(rows[:, : i + 1], cache=cache, return_cache=True)
            changes.append((step[:, -1] - logits[:, i]).abs().max().item())
        right = []
        for use_kv_cache in (False, True):
            new = model.generate(
                rows[:, :PROMPT], NEW_TOKENS, temperature=0.0, use_kv_cache=use_kv_cache
            )
            right.append((new == rows[:, PROMPT:]).float().mean().item())
    print("    the logits of cached steps differ from those of the sequence by up to", end=" ")
    print(f"{changes[0]:.0e}, {changes[1]:.0e}, {changes[2]:.0e} ... {changes[-1]:.0e}")
    print(f"    generate: {right[0]:.1%} of the new tokens are right without cache, ", end="")
    print(f"{right[1]:.1%} with it, the default")
    if use_dynamic_pos_bias:
        is_as_described &= max(changes) < 1e-3 and right[0] == right[1]
    else:
        is_as_described &= changes[0] < 1e-3 < 0.1 < max(changes) and right[1] < right[0] - 0.02
sys.exit(0 if is_as_described else "LocalTransformer no longer rotates cached keys again")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
