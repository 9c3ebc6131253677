#!/usr/bin/env bash
# linear-attention-transformer 0.19.1: with shift_tokens=True a token takes a part of its features
# from the one after it (if not causal), where masked ones are to count as zero. But the mask, whose
# name is input_mask, is looked for there as "mask" and never found. So the last token of a sequence
# reads the padding after it, and all tokens then depend on what ids the padding has. No error, no
# warning; without shift_tokens they do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 \
    linear-attention-transformer==0.19.1
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from linear_attention_transformer import LinearAttentionTransformerLM

torch.set_num_threads(1)
LENGTH, PADDING = 16, 16

is_as_described = True
for shift_tokens in (False, True):
    torch.manual_seed(0)
    model = LinearAttentionTransformerLM(
        num_tokens=50, dim=32, depth=2, heads=4, dim_head=8, max_seq_len=64,
        shift_tokens=shift_tokens,
    ).eval()
    ids = torch.randint(5, 50, (2, LENGTH))
    mask = torch.ones(2, LENGTH + PADDING, dtype=torch.bool)
    mask[:, LENGTH:] = False
    with torch.no_grad():
        alone = model(ids, input_mask=mask[:, :LENGTH])
        for padding_id in (0, 3):
            longer = torch.cat([ids, ids.new_full((2, PADDING), padding_id)], dim=1)
            changes = (model(longer, input_mask=mask)[:, :LENGTH] - alone).abs().amax((0, 2))
            print(f"{shift_tokens=}, {PADDING} masked ids {padding_id} after the sequence change")
            print(f"    the logits of its last token by up to {changes[-1].item():.1e},", end=" ")
            print(f"of the others by up to {changes[:-1].max().item():.1e}")
            if shift_tokens:
                is_as_described &= changes.min().item() > 1e-4 and changes[-1].item() > 0.01
            else:
                is_as_described &= changes.max().item() < 1e-5
sys.exit(0 if is_as_described else "shifted tokens no longer come from masked positions")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
