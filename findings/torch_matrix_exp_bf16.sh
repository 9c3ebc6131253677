#!/usr/bin/env bash
# torch 2.13.0, CPU: torch.linalg.matrix_exp, whose documentation lists bfloat16 first among the
# types that it supports, gives NaN, inf or -1.3e30 in bf16 for all but trivial matrices, even for
# zeros if there are several; fp16, which it does not list, is alike. So an orthogonal layer in bf16
# (parametrizations.orthogonal with orthogonal_map="matrix_exp") is NaN from its first step on. No
# error, no warning; in fp32 and fp64 it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch

text = " ".join(torch.linalg.matrix_exp.__doc__.split())
sentence = text[text.index("Supports input of") :].split(".")[0]
print("documentation:", sentence)
is_as_described = "bfloat16" in sentence
torch.manual_seed(0)
matrices = {
    "quarter turn": torch.tensor([[0.0, -torch.pi / 2], [torch.pi / 2, 0.0]]),
    "of size 0.1": 0.1 * torch.randn(8, 8),
    "of size 1": torch.randn(4, 4),
    "three of zeros": torch.zeros(3, 2, 2),
    "three of size 0.1": 0.1 * torch.randn(3, 4, 4),
}
for name, matrix in matrices.items():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        argument = matrix.to(dtype)
        right = torch.matrix_exp(argument.double())
        result = torch.linalg.matrix_exp(argument)
        error = ((result.double() - right).norm() / right.norm()).item()
        first = [f"{value:.4g}" for value in result.flatten()[:2].tolist()]
        print(f"{name:17} {str(dtype):14} first elements {first}, relative error {error:.1e}")
        if dtype in (torch.float64, torch.float32):
            is_as_described &= error < 1e-5
        else:
            is_as_described &= not error < 100  # or NaN
# The right result of the first one rotates by a quarter: 0, -1; 1, 0.
sys.exit(0 if is_as_described else "matrix_exp of 16-bit types has changed")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
