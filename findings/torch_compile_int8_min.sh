#!/usr/bin/env bash
# torch 2.13.0, x86 CPU: under torch.compile the smallest of 16 (with AVX2) or more int8 or uint8
# numbers that are all positive is 0, and so is the largest of negative int8 ones; argmin and argmax
# are not those of eager either. So ranges of quantized numbers come out too wide. No error, no
# warning; of fewer numbers, of int16 ones and in eager all is right. (It needs a C++ compiler.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch


def extremes(x):
    return x.amin(1), x.amax(1), x.argmin(1), x.argmax(1)


compiled_extremes = torch.compile(extremes, dynamic=False)
rows = torch.stack([torch.arange(20, 84), torch.arange(90, 26, -1)])  # of 64 numbers each
is_as_described = True
for name, numbers, dtype in (
    ("64 positive", rows, torch.int16),
    ("64 positive", rows, torch.uint8),
    ("64 positive", rows, torch.int8),
    ("64 negative", -rows, torch.int8),
    ("3 positive", rows[:, :3], torch.int8),
):
    x = numbers.to(dtype)
    eager, compiled = (
        [result.tolist() for result in of(x)] for of in (extremes, compiled_extremes)
    )
    print(f"rows of {name} {dtype} numbers")
    for kind, one, other in zip(("amin", "amax", "argmin", "argmax"), eager, compiled):
        print(f"    {kind:6} eager {one}, compiled {other}")
    if dtype == torch.int16 or name == "3 positive":
        is_as_described &= eager == compiled
    else:
        wrong = 0 if name == "64 positive" else 1
        is_as_described &= compiled[wrong] == [0, 0] != eager[wrong]
        is_as_described &= compiled[1 - wrong] == eager[1 - wrong]
        is_as_described &= compiled[2 + wrong] != eager[2 + wrong]
sys.exit(0 if is_as_described else "extremes of int8 numbers have changed under torch.compile")
PROGRAM
TORCHINDUCTOR_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" "$folder/program.py"
