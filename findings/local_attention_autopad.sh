#!/usr/bin/env bash
# local-attention 1.11.2: LocalAttention(autopad=True) pads sequences whose length is not a multiple
# of the window with zeros. If it is not causal and gets no mask, these zeros are attended to like
# tokens. So outputs near the end are too small, and a mask that is True everywhere changes them. No
# error, no warning; with such a mask, and for lengths that need no padding, it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 local-attention==1.11.2
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from local_attention import LocalAttention

torch.set_num_threads(1)
WINDOW = 8
attention = LocalAttention(
    dim=16, window_size=WINDOW, causal=False, look_backward=1, look_forward=1, autopad=True,
    use_rotary_pos_emb=False,
)


def by_hand(query, key, value):
    """Return softmax attention in which each window sees itself and the ones beside it."""
    window = torch.arange(query.shape[1]) // WINDOW
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores.masked_fill((window[:, None] - window[None]).abs() > 1, -torch.inf)
    return scores.softmax(-1) @ value


is_as_described = True
for length in (24, 20, 17):
    torch.manual_seed(0)
    query, key, value = [torch.randn(4, length, 16, dtype=torch.float64) for _ in range(3)]
    expected = by_hand(query, key, value)
    mask = torch.ones(4, length, dtype=torch.bool)
    without = (attention(query, key, value) - expected).abs().amax((0, 2))
    with_mask = (attention(query, key, value, mask=mask) - expected).abs().max().item()
    ones = attention(query, key, torch.ones_like(value))[0, :, 0]
    print(f"{length} positions, windows of {WINDOW}: without mask off by up to", end=" ")
    print(f"{without.max().item():.1e}, with a mask that is True everywhere {with_mask:.1e}")
    print("    of values that are all 1 the last position gets", f"{ones[-1].item():.3f}")
    is_as_described &= with_mask < 1e-6
    if length % WINDOW == 0:
        is_as_described &= without.max().item() < 1e-6 and ones[-1].item() > 0.999
    else:
        is_as_described &= without.max().item() > 0.1 and ones[-1].item() < 0.95
sys.exit(0 if is_as_described else "LocalAttention no longer attends to what autopad adds")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
