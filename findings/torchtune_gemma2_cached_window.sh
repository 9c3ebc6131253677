#!/usr/bin/env bash
# torchtune 0.6.1: Gemma 2's layers with a sliding window place it by rows and columns of the mask
# they get. With a cache a step of one token has one row, which is taken for the first position. So
# from the position on that is the window's size (4096 by default) a generated token attends to the
# first tokens of the text, not to the last ones and itself: logits are not those without a cache,
# as in training. No error, no warning; before that position, and without a window, they are the
# same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchtune==0.6.1 torchao==0.9.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys

import torch
from torchtune.models.gemma2._component_builders import gemma2

logging.disable()
torch.set_num_threads(1)
LENGTH, CACHE, PROMPT = 20, 32, 4
causal = torch.ones(CACHE, CACHE, dtype=torch.bool).tril()[None]
is_as_described = True
for window in (64, 8):
    torch.manual_seed(0)
    model = gemma2(
        vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, embed_dim=32,
        intermediate_dim=64, max_seq_len=CACHE, sliding_window_size=window,
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter.data, std=0.2)
    tokens = torch.randint(64, (1, LENGTH))
    with torch.no_grad():
        expected = model(tokens)
        model.setup_caches(batch_size=1, dtype=torch.float32, decoder_max_seq_len=CACHE)
        logits = [
            model(tokens[:, :PROMPT], mask=causal[:, :PROMPT], input_pos=torch.arange(PROMPT)[None])
        ]
        for i in range(PROMPT, LENGTH):
            step = {"mask": causal[:, i : i + 1], "input_pos": torch.tensor([[i]])}
            logits.append(model(tokens[:, i : i + 1], **step))
        errors = (torch.cat(logits, dim=1) - expected)[0].abs().amax(-1).tolist()
    print(f"a window of {window}: logits with a cache differ from those without, by position:")
    print("    " + " ".join(f"{error:.3f}" for error in errors))
    is_as_described &= max(errors[:window]) < 1e-3
    if window < LENGTH:
        is_as_described &= min(errors[window:]) > 0.05
sys.exit(0 if is_as_described else "a cached window of Gemma 2 has the last tokens")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
