#!/usr/bin/env bash
# x-transformers 2.31.10: AutoregressiveWrapper.generate caches keys and values, by default. With
# shift_tokens=1, which gives each token a part of the one before, a cached step has one token alone
# and shifts in zeros instead. So a model that has learned to continue a pattern does not, unless
# cache_kv=False. No error, no warning; without shift_tokens both ways give the same tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 x-transformers==2.31.10
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.set_num_threads(1)
vocab_size, period, prompt_length, new_tokens = 24, 5, 12, 20


def patterns(batch):
    """Return rows of five different random tokens that repeat."""
    ids = torch.rand(batch, vocab_size).argsort(-1)[:, :period]
    return ids.repeat(1, 7)[:, : prompt_length + new_tokens]


is_as_described = True
for shift_tokens in (0, 1):
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, shift_tokens=shift_tokens)
    model = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=vocab_size, max_seq_len=32, attn_layers=layers)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(400):
        optimizer.zero_grad()
        loss = model(patterns(32))
        loss.backward()
        optimizer.step()
    model.eval()
    texts = patterns(50)
    prompts, rest = texts[:, :prompt_length], texts[:, prompt_length:]
    print(f"shift_tokens={shift_tokens}, trained to a loss of {loss.item():.4f}")
    shares, agreements = {}, {}
    for cache_kv in (False, True):
        new = model.generate(prompts, new_tokens, temperature=0.0, cache_kv=cache_kv)
        with torch.no_grad():
            logits = model.net(torch.cat([prompts, new], 1)[:, :-1])[:, prompt_length - 1 :]
        shares[cache_kv] = (new == rest).float().mean().item()
        agreements[cache_kv] = (new == logits.argmax(-1)).float().mean().item()
        print(f"    cache_kv={cache_kv}: {shares[cache_kv]:.1%} of tokens continue the pattern,")
        print(f"        {agreements[cache_kv]:.1%} are those that one forward of all predicts")
    is_as_described &= shares[False] > 0.9 and agreements[False] == 1
    if shift_tokens:
        is_as_described &= shares[True] < shares[False] - 0.1 and agreements[True] < 0.9
    else:
        is_as_described &= shares[True] == shares[False] and agreements[True] == 1
sys.exit(0 if is_as_described else "cached steps no longer shift in zeros")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
