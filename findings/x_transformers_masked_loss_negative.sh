#!/usr/bin/env bash
# x-transformers 2.31.10: NonAutoregressiveWrapper weighs its loss, by default, with the derivative
# of its schedule over one minus it, which is negative, since the schedule is the share of masked
# tokens and falls. So the loss is negative, and training drives the right tokens' probabilities
# down: the cross-entropy of masked tokens rises far above that of guessing. With
# use_simple_mdlm_loss_weight=False it falls.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 x-transformers==2.31.10
cat > "$folder/program.py" <<'PROGRAM'
import random
import sys

import torch
import torch.nn.functional as F
from x_transformers import Encoder, TransformerWrapper
from x_transformers.nonautoregressive_wrapper import NonAutoregressiveWrapper

length, words, mask = 16, 8, 8


def batch():
    """Return sequences that count up from a random word, each of which is easy to complete."""
    first = torch.randint(words, (32, 1))
    return (first + torch.arange(length)) % words


def cross_entropy_of_masked(network):
    """Return the mean cross-entropy of the tokens under masks, half of all."""
    torch.manual_seed(2)
    tokens = batch()
    masked = torch.rand(tokens.shape) < 0.5
    with torch.no_grad():
        logits = network(torch.where(masked, mask, tokens))
    return F.cross_entropy(logits[masked], tokens[masked]).item()


found = {}
guessing = torch.tensor(float(words)).log().item()
for schedule in ("linear", "cosine"):
    for options in ({}, {"use_simple_mdlm_loss_weight": False}):
        torch.manual_seed(0)
        layers = Encoder(dim=32, depth=2, heads=2, attn_dim_head=16)
        network = TransformerWrapper(num_tokens=words + 1, max_seq_len=length, attn_layers=layers)
        wrapper = NonAutoregressiveWrapper(network, mask_id=mask, schedule=schedule, **options)
        optimizer = torch.optim.Adam(wrapper.parameters(), lr=1e-3)
        before, losses = cross_entropy_of_masked(network), []
        torch.manual_seed(1)
        random.seed(1)
        for _ in range(150):
            loss = wrapper(batch()).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(wrapper.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        after = cross_entropy_of_masked(network)
        found[schedule, bool(options)] = losses, after
        print(f"{schedule}, {options or 'by default'}:")
        print("    losses", " ".join(f"{loss:.2f}" for loss in losses[::30]))
        print(f"    cross-entropy of masked tokens {before:.2f},", end=" ")
        print(f"after 150 steps {after:.2f} (guessing: {guessing:.2f})")
is_as_described = True
for (_, is_plain), (losses, after) in found.items():
    if is_plain:
        is_as_described &= min(losses) > 0 and after < guessing
    else:
        is_as_described &= max(losses) < 0 and after > 2 * guessing
sys.exit(0 if is_as_described else "the weighted loss is no longer negative")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
