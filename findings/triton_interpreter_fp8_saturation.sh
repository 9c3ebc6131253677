#!/usr/bin/env bash
# Triton 3.7.1: in the interpreter (TRITON_INTERPRET=1) a cast to tl.float8e4nv of a number above
# its largest, 448, gives some smaller number instead of 448 (as torch gives, and the PTX
# instruction that compiled kernels use, cvt.rn.satfinite.e4m3x2.f32). No error, no warning.
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
def cast(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(tl.float8e4nv))


x = torch.tensor([1.0, 448.0, 500.0, 1e4])
out = torch.empty(4, dtype=torch.float8_e4m3fn)
cast[(1,)](x, out, 4)
expected = x.to(torch.float8_e4m3fn)
print("numbers: ", x.tolist())
print("torch:   ", expected.float().tolist())
print("interpreter:", out.float().tolist())
is_as_described = (
    expected.float().tolist() == [1.0, 448.0, 448.0, 448.0]
    and out.float().tolist() == [1.0, 448.0, 256.0, 320.0]
)
sys.exit(0 if is_as_described else "the interpreter casts large numbers differently now")
PROGRAM
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/program.py"
