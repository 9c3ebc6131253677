#!/usr/bin/env bash
# torch 2.13.0, x86 CPU: SGD with fused=True does not move bf16 and fp16 parameters, but for the
# last few elements: it writes nothing for whole vectors (of 16 elements with AVX2), only for the
# rest that does not fill one. No error, no warning; with fused=False, in fp32, and with AdamW all
# elements move.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from torch.optim import SGD, AdamW


def moved(optimizer_class, dtype, is_fused, size):
    """Return how many of the parameter's elements a step of gradient 1 has moved."""
    parameter = torch.nn.Parameter(torch.ones(size, dtype=dtype))
    optimizer = optimizer_class([parameter], lr=0.25, fused=is_fused)
    parameter.sum().backward()
    optimizer.step()
    return int((parameter != 1).sum())


is_as_described = True
for optimizer_class in (SGD, AdamW):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for is_fused in (False, True):
            few, many, more = (moved(optimizer_class, dtype, is_fused, n) for n in (3, 64, 67))
            print(
                f"{optimizer_class.__name__:5} {dtype!s:14} fused={is_fused!s:5} "
                f"moved {few} of 3, {many} of 64, {more} of 67"
            )
            is_wrong = optimizer_class is SGD and is_fused and dtype != torch.float32
            is_as_described &= (few, many, more) == ((3, 0, 3) if is_wrong else (3, 64, 67))
sys.exit(0 if is_as_described else "fused SGD moves half-precision parameters")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
