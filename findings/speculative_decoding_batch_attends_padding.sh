#!/usr/bin/env bash
# speculative-decoding 0.2.0: rows of a batch that have accepted different numbers of tokens are
# aligned to the right, and what is left of a shorter row is to be masked: the decoder makes the
# mask (seq_start_pos), but hands it to the layers of early exits alone. So a row attends to
# leftovers of itself that stand before its prompt, and what it generates depends on the rows
# beside it. Greedy decoding, which by the paper (arXiv:2211.17192) gives the tokens of the large
# model, gives others. No error, no warning; alone, or beside copies of itself, a row gets the
# tokens of base_decoding.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 speculative-decoding==0.2.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from speculative_decoding import Decoder, base_decoding, speculative_decoding

torch.set_num_threads(1)
VOCAB_SIZE, PROMPT_LENGTH, LENGTH, ROWS = 32, 16, 80, 8


def make_decoder(seed, **sizes):
    torch.manual_seed(seed)
    return Decoder(num_tokens=VOCAB_SIZE, dim_head=16, **sizes).eval()


large = make_decoder(0, dim=64, depth=2, heads=4)
# The large model with one matrix halved, so that rows differ in how many tokens are accepted.
small = make_decoder(0, dim=64, depth=2, heads=4)
with torch.no_grad():
    small.layers[1][1][3].weight.mul_(0.5)
torch.manual_seed(1)
prompts = torch.randint(VOCAB_SIZE, (ROWS, PROMPT_LENGTH))
expected = base_decoding(large, prompts, LENGTH, temperature=0.0)


def generate(rows):
    """Return greedy tokens of these rows, and the mean number of accepted tokens."""
    tokens, accepted = speculative_decoding(large, small, prompts[rows], LENGTH, temperature=0.0)
    return tokens, float(accepted)


def wrong_tokens(tokens, rows):
    return (tokens != expected[rows]).sum(1).tolist()


print(f"{LENGTH - PROMPT_LENGTH} greedy tokens, those that differ from base_decoding's:")
alone, copies = [], []
for row in range(ROWS):
    tokens, accepted = generate([row])
    alone += wrong_tokens(tokens, [row])
    tokens, _ = generate([row] * 3)
    copies += wrong_tokens(tokens, [row] * 3)
together, accepted = generate(list(range(ROWS)))
together = wrong_tokens(together, list(range(ROWS)))
print(f"    each row alone: {alone}")
print(f"    each row beside two copies of itself: {copies}")
print(f"    all rows in one batch, {accepted:.2f} of 5 accepted: {together}")
is_as_described = sum(alone) == 0 and sum(copies) == 0 and sum(together) > 20
sys.exit(0 if is_as_described else "rows of a batch no longer depend on each other")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
