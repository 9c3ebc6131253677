#!/usr/bin/env bash
# torchtune 0.6.1: PackedDataset with split_across_pack=True, as its error about long samples
# advises, numbers the tokens of a sample that is longer than max_seq_len modulo max_seq_len, from
# the sample's beginning, not the pack's. If the sample does not begin at the start of a pack,
# positions so fall back to 0 amid a stretch that the mask takes for one document: what follows has
# positions before what it follows, and other logits than in order. No error, no warning; a
# sample that begins with a pack, and shorter ones, are right. (The authors chose the remainder so
# that positions stay in range.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchtune==0.6.1 torchao==0.9.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys

import torch
from torchtune.datasets import PackedDataset
from torchtune.models.llama3 import llama3
from torchtune.modules.attention_utils import create_block_causal_mask

logging.disable()
torch.manual_seed(0)
LENGTH = 8
model = llama3(
    vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=LENGTH,
    intermediate_dim=64,
)
is_as_described = True
for sizes in ((8, 20), (3, 5, 8), (3, 20)):
    samples = [torch.randint(64, (size,)).tolist() for size in sizes]
    packs = PackedDataset(
        [{"tokens": tokens, "labels": tokens} for tokens in samples], max_seq_len=LENGTH,
        split_across_pack=True,
    )
    print(f"samples of {sizes} tokens in packs of {LENGTH}")
    worst = 0.0
    for pack in packs:
        tokens, positions = pack["tokens"][None], pack["input_pos"][None]
        lengths = [pack["seq_lens"]]
        consecutive = torch.cat([torch.arange(length) for length in pack["seq_lens"]])[None]
        mask = create_block_causal_mask(lengths)
        with torch.no_grad():
            logits = model(tokens, mask=mask, input_pos=positions)
            expected = model(tokens, mask=mask, input_pos=consecutive)
        is_text = pack["labels"] != -100
        error = (logits - expected)[0, is_text].abs().max().item()
        worst = max(worst, error)
        print(f"    documents of {pack['seq_lens'].tolist()}: positions", end=" ")
        print(f"{positions[0].tolist()}; logits are off by up to {error:.6f}")
    is_as_described &= worst > 0.01 if sizes == (3, 20) else worst < 1e-4
sys.exit(0 if is_as_described else "positions within a document of a pack are consecutive")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
