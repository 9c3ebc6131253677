#!/usr/bin/env bash
# Triton 3.7.1: in the interpreter (TRITON_INTERPRET=1) tl.dot of two bf16 tiles multiplies the raw
# 16-bit patterns as integers. No error, no warning: the result is off by many orders of magnitude.
# fp16 is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 triton==3.7.1 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def product(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    offsets = i[:, None] * N + i[None, :]
    tl.store(out_ptr + offsets, tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets)))


def error_of(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(16, 16).to(dtype), torch.randn(16, 16).to(dtype)
    out = torch.empty(16, 16)
    product[(1,)](a, b, out, 16)
    expected = a.float() @ b.float()
    return ((out - expected).norm() / expected.norm()).item()


errors = {str(dtype): error_of(dtype) for dtype in (torch.float16, torch.bfloat16)}
print("relative errors:", errors)
is_as_described = errors["torch.float16"] < 1e-3 and errors["torch.bfloat16"] > 1e3
sys.exit(0 if is_as_described else "bf16 products are no longer wrong")
PROGRAM
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/program.py"
