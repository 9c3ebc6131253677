#!/usr/bin/env bash
# reformer-pytorch 1.4.4: with layer_dropout above 0, texts of at most reverse_thres tokens train no
# layer. reverse_thres turns the reversible layers off for them, for speed; but layer_dropout
# chooses among the reversible ones, which run without recording gradients and leave that to a
# backward pass that is not there. Only the last norm and the logits' weight learn, not even the
# embedding. No error, no warning; the loss stays at that of guessing. Longer texts train
# everything.
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

torch.set_num_threads(1)
LENGTH, PERIOD = 32, 16


def train(layer_dropout, reverse_thres):
    """Return names of parameters that moved, of all, and the loss of repeating the last 16 ids."""
    torch.manual_seed(0)
    model = ReformerLM(
        num_tokens=20, dim=64, depth=2, max_seq_len=LENGTH, heads=4, dim_head=16, causal=True,
        bucket_size=8, n_hashes=2, ff_chunks=1, absolute_position_emb=True,
        layer_dropout=layer_dropout, reverse_thres=reverse_thres,
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(300):
        tokens = torch.randint(20, (16, PERIOD)).repeat(1, 3)[:, : LENGTH + 1]
        logits = model(tokens[:, :-1]).transpose(1, 2)
        loss = torch.nn.functional.cross_entropy(logits[..., PERIOD:], tokens[:, PERIOD + 1 :])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    moved = [name for name, value in model.named_parameters() if not value.equal(before[name])]
    return moved, len(before), sum(losses[-50:]) / 50


is_as_described = True
results = {}
for layer_dropout in (0.0, 0.01):
    for reverse_thres in (LENGTH - 1, LENGTH):
        moved, count, loss = train(layer_dropout, reverse_thres)
        results[layer_dropout, reverse_thres] = loss
        print(f"{layer_dropout=}, {reverse_thres=}, {LENGTH} tokens:", end=" ")
        print(f"{len(moved)} of {count} parameters move, the loss in the end is {loss:.3f}")
        if layer_dropout > 0 and reverse_thres == LENGTH:
            print("   ", *moved)
            is_as_described &= moved == ["norm.weight", "norm.bias", "out.1.weight", "out.1.bias"]
            is_as_described &= loss > 2.5
        else:
            is_as_described &= len(moved) == count and loss < 1.5
sys.exit(0 if is_as_described else "layer_dropout now trains layers of short texts")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
