#!/usr/bin/env bash
# memorizing-transformers-pytorch 0.4.1: once more than max_memories are added, which is to "throw
# out the oldest memories", KNNMemory finds the wrong ones. On overflow its index starts again at 0,
# while the place in its array of keys and values goes on. From then on a search for a stored key
# returns keys and values of other times, and right after the overflow it returns nothing. No error,
# no warning; the example in its README overflows at the third of four additions.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 faiss-cpu==1.15.1 joblib==1.6.0 \
    filelock==4.3.1 einops==0.8.2 einops-exts==0.0.4
"$folder/venv/bin/pip" install --quiet --no-deps memorizing-transformers-pytorch==0.4.1
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from memorizing_transformers_pytorch import KNNMemory

torch.manual_seed(0)
DIM, NEW, MAX = 16, 24, 64
memory = KNNMemory(
    dim=DIM, max_memories=MAX, num_indices=2, memmap_filename=sys.argv[1], multiprocessing=False
)
is_as_described = True
for step in range(1, 6):
    keys = torch.nn.functional.normalize(torch.randn(2, NEW, DIM), dim=-1)
    values = torch.randn(2, NEW, DIM)
    memory.add(torch.stack((keys, values), dim=-2))
    found, mask = memory.search(keys, topk=1)  # the nearest of each key that was just added
    found_keys, found_values = found[..., 0, :, :].unbind(-2)
    is_right = (found_keys - keys).abs().amax(-1) < 1e-5
    is_right &= (found_values - values).abs().amax(-1) < 1e-5
    right, returned = is_right.double().mean().item(), mask.double().mean().item()
    print(f"{step * NEW:3} memories added, at most {MAX}:", end=" ")
    print(f"{returned:.0%} of the last {NEW} keys find something, {right:.0%} find their own value")
    if step * NEW <= MAX:
        is_as_described &= right == 1
    else:
        just_now = (step - 1) * NEW <= MAX
        is_as_described &= right < 0.1 and returned == (0 if just_now else 1)
sys.exit(0 if is_as_described else "memories are now found after an overflow")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder/memories"
