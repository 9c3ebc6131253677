#!/usr/bin/env bash
# torch 2.13.0: flex_attention without torch.compile looks only at the mask_mod of a BlockMask, not
# at its blocks. A mask that BlockMask.from_kv_blocks makes of blocks alone, mask_mod being
# optional, so masks nothing: each query attends to all keys. Compiled it attends to the blocks. So
# a reference, a test or debugging without compilation computes another model. Its warning is of
# the memory that all scores take, not of this; with a mask_mod for the same blocks both ways are
# the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK, BLOCKS = 128, 3


def same_block(batch, head, query, key):
    return query // BLOCK == key // BLOCK


torch.manual_seed(0)
query, key, value = (torch.randn(1, 2, BLOCKS * BLOCK, 16) for _ in range(3))
number = torch.ones(1, 1, BLOCKS, dtype=torch.int32)  # of blocks of keys per block of queries
first = torch.arange(BLOCKS, dtype=torch.int32)[:, None]
rest = torch.zeros(BLOCKS, BLOCKS - 1, dtype=torch.int32)
indices = torch.cat([first, rest], dim=1)[None, None]  # block n of queries: block n of keys
place = torch.arange(BLOCKS * BLOCK)
mask = same_block(0, 0, place[:, None], place)
in_blocks = F.scaled_dot_product_attention(query, key, value, mask)
to_all = F.scaled_dot_product_attention(query, key, value)
compiled = torch.compile(flex_attention)
is_as_described = True
for name, mask_mod in (("blocks alone", None), ("blocks and mask_mod", same_block)):
    block_mask = BlockMask.from_kv_blocks(number, indices, BLOCK_SIZE=BLOCK, mask_mod=mask_mod)
    for way, attention in (("eager", flex_attention), ("compiled", compiled)):
        output = attention(query, key, value, block_mask=block_mask)
        from_blocks = (output - in_blocks).abs().max().item()
        from_all = (output - to_all).abs().max().item()
        print(
            f"{name:19}, {way:8}: differs by {from_blocks:.1e} from attention in blocks, "
            f"by {from_all:.1e} from attention to all"
        )
        attends_to_all = from_all < 1e-5 and from_blocks > 0.1
        attends_in_blocks = from_blocks < 1e-5 and from_all > 0.1
        if mask_mod is None and way == "eager":
            is_as_described &= attends_to_all
        else:
            is_as_described &= attends_in_blocks
sys.exit(0 if is_as_described else "what flex_attention does with blocks alone has changed")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
