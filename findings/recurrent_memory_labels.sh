#!/usr/bin/env bash
# recurrent-memory-transformer-pytorch 0.7.0: RecurrentMemoryTransformerWrapper takes labels and
# forgets them at once ("labels = None"). With return_loss=True the loss is that of the next tokens
# of the input, whatever labels say, masked ones (-1, its ignore_index) included. No error, no
# warning. The transformer in it takes labels and heeds them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 \
    recurrent-memory-transformer-pytorch==0.7.0 hyper-connections==0.4.11 packaging==26.4
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from recurrent_memory_transformer_pytorch import (
    RecurrentMemoryTransformer,
    RecurrentMemoryTransformerWrapper,
)

torch.set_num_threads(1)
SEGMENT = 16
torch.manual_seed(0)
tokens = torch.randint(10, (8, SEGMENT))
following = torch.cat([tokens[:, 1:], torch.full((8, 1), -1)], dim=1)
masked = following.masked_fill(torch.rand(8, SEGMENT) < 0.5, -1)
labels_of = {"next tokens": following, "half of them masked": masked, "sevens": 0 * tokens + 7}


def train(labels, with_wrapper):
    """Return the first loss and the mean probability of 7 after 60 steps."""
    torch.manual_seed(1)
    model = RecurrentMemoryTransformer(
        num_tokens=10, num_memory_tokens=2, dim=32, depth=1, dim_head=16, heads=2, seq_len=SEGMENT
    )
    wrapper = RecurrentMemoryTransformerWrapper(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        if with_wrapper:
            loss = wrapper(tokens, labels=labels, return_loss=True)[0]
        else:
            loss = model(tokens, labels=labels)[0]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return losses[0], model(tokens)[0].softmax(-1)[..., 7].mean().item()


is_as_described = True
for with_wrapper in (False, True):
    print("RecurrentMemoryTransformer" + ("Wrapper" if with_wrapper else ""))
    found = {name: train(labels, with_wrapper) for name, labels in labels_of.items()}
    for name, (loss, sevens) in found.items():
        print(f"    labels are {name}: first loss {loss:.4f}, in the end P(7) is {sevens:.3f}")
    losses = {round(loss, 4) for loss, _ in found.values()}
    is_as_described &= len(losses) == (1 if with_wrapper else 3)
    is_as_described &= (found["sevens"][1] > 0.95) == (not with_wrapper)
sys.exit(0 if is_as_described else "the wrapper now heeds labels")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
