#!/usr/bin/env bash
# x-transformers 2.31.10: AutoregressiveWrapper.generate takes a list of prompts of different
# lengths and pads the shorter ones on the left. If the model has memory tokens, which go before all
# others, it masks the first positions of the two together: memory tokens instead of padding. So a
# short prompt gives other tokens than alone. No error, no warning; without memory tokens, and for
# the longest prompt, they are the same.
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
vocab_size, period, new_tokens = 24, 5, 12
LENGTHS = (8, 12, 20)


def patterns(batch):
    """Return rows of five different random tokens that repeat."""
    return torch.rand(batch, vocab_size).argsort(-1)[:, :period].repeat(1, 7)[:, :32]


is_as_described = True
for memory_tokens in (0, 4):
    torch.manual_seed(0)
    model = AutoregressiveWrapper(
        TransformerWrapper(
            num_tokens=vocab_size, max_seq_len=32, num_memory_tokens=memory_tokens,
            attn_layers=Decoder(dim=64, depth=2, heads=4, attn_dim_head=16),
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(600):
        optimizer.zero_grad()
        loss = model(patterns(32))
        loss.backward()
        optimizer.step()
    model.eval()
    print(f"num_memory_tokens={memory_tokens}, trained to a loss of {loss.item():.4f}")
    texts = [patterns(20) for _ in LENGTHS]
    right_alone, right_together, same = [[0.0] * len(LENGTHS) for _ in range(3)]
    for rows in zip(*texts, strict=True):
        prompts = [row[:length] for row, length in zip(rows, LENGTHS, strict=True)]
        together = model.generate(prompts, new_tokens, temperature=0.0)
        for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            alone = model.generate(prompt[None], new_tokens, temperature=0.0)[0]
            rest = row[len(prompt) : len(prompt) + new_tokens]
            right_alone[i] += (alone == rest).float().mean().item() / len(texts[0])
            right_together[i] += (together[i] == rest).float().mean().item() / len(texts[0])
            same[i] += (together[i] == alone).float().mean().item() / len(texts[0])
    for i, length in enumerate(LENGTHS):
        print(f"    prompts of {length:2} tokens: {right_alone[i]:.1%} of new ones right", end=" ")
        print(f"alone, {right_together[i]:.1%} in a list; {same[i]:.1%} are the same")
    is_as_described &= min(right_alone) > 0.9 and same[-1] > 0.999
    is_as_described &= min(same) > 0.999 if memory_tokens == 0 else max(same[:-1]) < 0.98
sys.exit(0 if is_as_described else "memory tokens no longer take the place of padding")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
