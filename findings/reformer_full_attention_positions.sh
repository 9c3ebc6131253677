#!/usr/bin/env bash
# reformer-pytorch 1.4.4: ReformerLM tells its layers positions by rotary embeddings, unless one of
# the other three kinds is asked for. Full attention leaves these out (use_full_attn=True, "for
# comparison" in the README, or a text of at most full_attn_thres tokens). So the model does not
# know the order of its tokens: shuffled tokens have the same logits, shuffled. No error, no
# warning. With LSH attention they have others, and so with full attention and
# absolute_position_emb.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 reformer-pytorch==1.4.4 \
    local-attention==1.11.2
cat > "$folder/program.py" <<'PROGRAM'
import math
import sys

import torch
from reformer_pytorch import ReformerLM

VOCAB_SIZE, LENGTH = 20, 64


def of_options(options):
    torch.manual_seed(0)
    return ReformerLM(
        num_tokens=VOCAB_SIZE, dim=32, depth=2, max_seq_len=LENGTH, heads=2, dim_head=16,
        bucket_size=8, n_hashes=4, ff_chunks=1, **options,
    )


@torch.no_grad()
def change_by_order(options):
    """Return how far logits move if tokens are shuffled and the logits put back in order."""
    model = of_options(options).double().eval()
    tokens = torch.randint(VOCAB_SIZE, (4, LENGTH))
    order = torch.randperm(LENGTH)
    logits = []
    for row in (tokens, tokens[:, order]):
        torch.manual_seed(1)  # the same hashes
        logits.append(model(row))
    return (logits[0][:, order] - logits[1]).abs().max().item()


def learn_reversal(options):
    """Return the loss after learning to write random tokens backwards."""
    model = of_options(options)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(250):
        tokens = torch.randint(VOCAB_SIZE, (16, 16))
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


torch.set_num_threads(1)
is_as_described = True
for options in (
    {},
    {"use_full_attn": True, "absolute_position_emb": True},
    {"use_full_attn": True},
    {"full_attn_thres": LENGTH},
):
    change = change_by_order(options)
    print(f"{options}: shuffled tokens change their logits by up to {change:.1e}")
    knows_order = not options or "absolute_position_emb" in options
    is_as_described &= change > 1e-2 if knows_order else change < 1e-9
at_random = math.log(VOCAB_SIZE)
print(f"loss after learning to write 16 tokens backwards (at random {at_random:.2f}):")
for options in ({"absolute_position_emb": True}, {}):
    loss = learn_reversal({"use_full_attn": True, **options})
    print(f"    full attention, {options}: {loss:.2f}")
    is_as_described &= loss < 0.8 * at_random if options else loss > 0.6 * at_random
sys.exit(0 if is_as_described else "full attention now knows the order of tokens")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
