#!/usr/bin/env bash
# memorizing-transformers-pytorch 0.4.1: memories that are added to some rows of a batch only,
# within at_batch_indices, move the place for new keys and values of all rows. In the others it then
# runs ahead of their index, so what they add later cannot be found: a search for a stored key
# returns zeros, or keys and values of another. No error, no warning. As long as all rows add, all
# is found.
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
DIM, NEW = 16, 12
memory = KNNMemory(
    dim=DIM, max_memories=256, num_indices=3, memmap_filename=sys.argv[1], multiprocessing=False
)
is_as_described = True
for step, rows in enumerate(((0, 1, 2), (0,), (0, 1), (0, 1, 2))):
    keys = torch.nn.functional.normalize(torch.randn(len(rows), NEW, DIM), dim=-1)
    values = torch.randn(len(rows), NEW, DIM)
    with memory.at_batch_indices(rows):
        memory.add(torch.stack((keys, values), dim=-2))
        found, mask = memory.search(keys, topk=1)
    is_right = (found[..., 0, 1, :] - values).abs().amax(-1) < 1e-5
    right = dict(zip(rows, is_right.double().mean(1).tolist(), strict=True))
    print(f"rows {rows} add {NEW} keys and search for them; their own values are found by", end=" ")
    print(", ".join(f"row {row} in {share:.0%}" for row, share in right.items()))
    is_as_described &= bool(mask.all())
    for row, share in right.items():
        has_missed_some = step > 1 and row > 0
        is_as_described &= share == 0 if has_missed_some else share == 1
sys.exit(0 if is_as_described else "rows now keep places of their own")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder/memories"
