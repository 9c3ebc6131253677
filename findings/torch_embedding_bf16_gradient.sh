#!/usr/bin/env bash
# torch 2.13.0, CPU: in bf16 and fp16 F.embedding's backward adds the gradients of a token's
# occurrences in that type, one after the other. So a row stops growing where a gradient is below
# the sum's last digit: of a token that occurs 4096 times with gradient 1 it is 256 in bf16, 2048 in
# fp16. A batch's frequent tokens train too little. No error, no warning. So it is for
# weight[ids] and embedding_bag; weight.index_select(0, ids) and gather of the same ids are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F

torch.manual_seed(0)
lookups = {
    "embedding": F.embedding,
    "weight[ids]": lambda ids, weight: weight[ids],
    "embedding_bag": lambda ids, weight: F.embedding_bag(ids[:, None], weight, mode="sum"),
    "index_select": lambda ids, weight: weight.index_select(0, ids),
    "gather": lambda ids, weight: weight.gather(0, ids[:, None].expand(-1, weight.shape[1])),
}
are_right = {"index_select", "gather"}


def gradient(lookup, ids, upstream, dtype):
    weight = torch.zeros(8, upstream.shape[1], dtype=dtype, requires_grad=True)
    return torch.autograd.grad(lookup(ids, weight), weight, upstream.to(dtype))[0].double()


is_as_described = True
ids = torch.zeros(4096, dtype=torch.int64)
print("a token that occurs 4096 times, each time with gradient 1")
for name, lookup in lookups.items():
    got = [
        gradient(lookup, ids, torch.ones(4096, 1), dtype)[0, 0].item()
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    print(f"    {name:13} bf16 {got[0]}, fp16 {got[1]}, fp32 {got[2]}")
    expected = [4096.0] * 3 if name in are_right else [256.0, 2048.0, 4096.0]
    is_as_described &= got == expected
ids = torch.randint(8, (32768,))
upstream = (torch.randn(32768, 64) + 0.3).bfloat16()
print("32768 tokens of a vocabulary of 8, random gradients: error in bf16")
for name, lookup in lookups.items():
    got = gradient(lookup, ids, upstream, torch.bfloat16)
    expected = gradient(lookup, ids, upstream, torch.float64)
    error = ((got - expected).norm() / expected.norm()).item()
    print(f"    {name:13} {error:.1%}")
    is_as_described &= error < 0.01 if name in are_right else error > 0.1
sys.exit(0 if is_as_described else "embedding no longer adds gradients of bf16 rows in bf16")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
