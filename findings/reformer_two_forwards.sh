#!/usr/bin/env bash
# reformer-pytorch 1.4.4: gradients are wrong if a model runs twice before backward, as for a loss
# over pairs of texts, or a sum of two batches' losses. Its reversible layers (the default) run
# again in backward, with the hashes and the state of the random generator of the latest forward,
# which they keep in one place, not for each forward. No error, no warning. With reverse_thres at
# the length (which keeps activations), or with one backward after each forward, gradients are
# right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 reformer-pytorch==1.4.4 \
    local-attention==1.11.2
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from reformer_pytorch import ReformerLM

LENGTH = 64


def gradient(reversible, at_once, dropout=0.0, use_full_attn=False):
    """Return the gradient of the sum of two batches' losses, all parameters in one vector."""
    torch.manual_seed(0)
    model = ReformerLM(
        num_tokens=50, dim=32, depth=2, max_seq_len=LENGTH, heads=2, dim_head=16, causal=True,
        bucket_size=4, n_hashes=1, ff_chunks=1, ff_dropout=dropout, use_full_attn=use_full_attn,
        reverse_thres=0 if reversible else LENGTH,
    ).double()
    total = 0
    for batch in range(2):
        torch.manual_seed(10 + batch)
        tokens = torch.randint(50, (2, LENGTH + 1))
        logits = model(tokens[:, :-1]).transpose(1, 2)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:])
        if at_once:
            total = total + loss
        else:
            loss.backward()
    if at_once:
        total.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


is_as_described = True
for name, options in (
    ("LSH attention", {}),
    ("full attention", {"use_full_attn": True}),
    ("full attention, ff_dropout=0.1", {"use_full_attn": True, "dropout": 0.1}),
):
    print(f"{name}: how far the gradient is from that without reversible layers")
    expected = gradient(reversible=False, at_once=False, **options)
    for reversible, at_once in ((False, True), (True, False), (True, True)):
        found = gradient(reversible, at_once, **options)
        error = ((found - expected).norm() / expected.norm()).item()
        print(f"    {reversible=!s:5} {at_once=!s:5}: {error:.1e}")
        if reversible and at_once and name != "full attention":
            is_as_described &= error > 0.05
        else:
            is_as_described &= error < 1e-9
sys.exit(0 if is_as_described else "two forwards before backward now have right gradients")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
