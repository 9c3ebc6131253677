#!/usr/bin/env bash
# torch 2.13.0: F.linear_cross_entropy with LinearCrossEntropyOptions() makes gradients in forward,
# in fp16 if the operands are, and multiplies them by the upstream gradient later. So a loss scale,
# as of GradScaler, comes too late: what underflows stays 0. Without options the scale keeps it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F
from torch.nn import LinearCrossEntropyOptions

T, H, V, scale = 32768, 16, 64, 2.0**15
torch.manual_seed(0)
hidden = torch.randn(T, H).half()
weight = (0.005 * torch.randn(V, H)).half()
labels = torch.randint(V, (T,))


def dhidden(dtype, options):
    h = hidden.to(dtype, copy=True).requires_grad_()
    losses = F.linear_cross_entropy(h, weight.to(dtype), labels, options=options)
    (losses.float() * scale).backward()
    return h.grad.double() / scale


exact = dhidden(torch.float32, None)
found = {}
for name, options in (("no options", None), ("options", LinearCrossEntropyOptions())):
    gradient = dhidden(torch.float16, options)
    error = float((gradient - exact).norm() / exact.norm())
    zeros = float((gradient == 0).double().mean())
    found[name] = error
    print(f"fp16, {name}, scale {scale:g}: dhidden off by {error:.1%}, {zeros:.1%} are 0")
is_late = found["no options"] < 0.01 < 0.05 < found["options"]
sys.exit(0 if is_late else "a loss scale now keeps the gradients of the chunked loss")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
