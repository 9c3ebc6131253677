#!/usr/bin/env bash
# native-sparse-attention-pytorch 0.2.3: with a cache, SparseAttention leaves out its learned
# compressed keys and values (compress_mem_kv), which each token attends to in training, until the
# first block of tokens is compressed. So after a prompt that is shorter than a block the next
# tokens differ from those of the whole sequence; after a longer one all agree. It shows only once a
# model is trained: both are zeros in a new one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 \
    native-sparse-attention-pytorch==0.2.3 einx==0.4.3 local-attention==1.11.2 \
    rotary-embedding-torch==0.9.1
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from native_sparse_attention_pytorch import SparseAttention

block, length = 4, 24
torch.manual_seed(0)
attention = SparseAttention(
    dim=32,
    dim_head=8,
    heads=4,
    sliding_window_size=4,
    compress_block_size=block,
    compress_block_sliding_stride=block,
    selection_block_size=block,
    num_selected_blocks=2,
    causal=True,
).double()
x = torch.randn(2, length, 32, dtype=torch.float64)


@torch.no_grad()
def differing_tokens(prompt):
    """Return the tokens whose output with a cache is not that of the whole sequence."""
    whole = attention(x)
    output, cache = attention(x[:, :prompt], return_cache=True)
    outputs = [output]
    for token in range(prompt, length):
        output, cache = attention(x[:, token : token + 1], cache=cache, return_cache=True)
        outputs.append(output)
    differences = (torch.cat(outputs, dim=1) - whole).abs().amax(dim=(0, 2))
    return (differences > 1e-5).nonzero().flatten().tolist(), differences.max().item()


found = {}
for state in ("new", "after a training step"):
    for prompt in (1, 2, block, 2 * block + 1):
        found[state, prompt], largest = differing_tokens(prompt)
        print(f"{state}, prompt of {prompt}: tokens {found[state, prompt]} differ,", end=" ")
        print(f"by up to {largest:.1e}")
    optimizer = torch.optim.Adam(attention.parameters(), lr=0.1)
    attention(x).square().mean().backward()
    optimizer.step()
trained = "after a training step"
is_as_described = not any(found["new", prompt] for prompt in (1, 2, block, 2 * block + 1))
is_as_described &= found[trained, 1] == [1, 2, 3] and found[trained, 2] == [2, 3]
is_as_described &= not found[trained, block] and not found[trained, 2 * block + 1]
sys.exit(0 if is_as_described else "memories are now used from the first token on")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
