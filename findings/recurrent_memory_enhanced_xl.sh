#!/usr/bin/env bash
# recurrent-memory-transformer-pytorch 0.7.0: enhanced_xl_recurrence=True (of ERNIE-Doc, arXiv
# 2012.15688) is to let a layer attend to the XL memory of the layer above it. It changes nothing:
# the list of memories is shifted after an iterator over the old one was made, and layers read that.
# No error, no warning. Shifting the list before the call shows what it should do.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 \
    recurrent-memory-transformer-pytorch==0.7.0 hyper-connections==0.4.11 packaging==26.4
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

SEGMENT = 16


def model_of(enhanced_xl_recurrence):
    torch.manual_seed(0)
    return RecurrentMemoryTransformer(
        num_tokens=20, num_memory_tokens=2, dim=32, depth=3, dim_head=16, heads=2,
        seq_len=SEGMENT, enhanced_xl_recurrence=enhanced_xl_recurrence,
    ).double().eval()


plain, enhanced = model_of(False), model_of(True)
tokens = torch.randint(20, (4, 2 * SEGMENT))
first, second = tokens.split(SEGMENT, dim=1)
with torch.no_grad():
    _, memories, xl_memories = plain(first)
    above = [*xl_memories[1:], xl_memories[0]]
    expected = plain(second, memories, xl_memories=xl_memories)[0]
    logits = {
        "no XL memories": plain(second, memories)[0],
        "those of the layer above": plain(second, memories, xl_memories=above)[0],
        "enhanced_xl_recurrence=True": enhanced(second, memories, xl_memories=xl_memories)[0],
    }
is_as_described = True
print("largest difference of logits from those with XL memories of the same layer")
for name, values in logits.items():
    difference = (values - expected).abs().max().item()
    print(f"    {name}: {difference:.4f}")
    is_as_described &= difference == 0 if "enhanced" in name else difference > 1e-3
sys.exit(0 if is_as_described else "enhanced_xl_recurrence now has an effect")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
