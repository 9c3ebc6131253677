#!/usr/bin/env bash
# torch 2.13.0, x86 CPU, fp32: F.gelu, x * Phi(x), of a tensor of several elements (then oneDNN
# computes it) gives NaN for inf and inf for 3e38. Of a tensor of one element, and without oneDNN,
# it gives inf and 3e38. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F

x = torch.tensor([float("inf"), 3e38])
alone = torch.cat([F.gelu(x[i : i + 1]) for i in range(2)])
among_others = F.gelu(x.repeat(4))[:2]
with torch.backends.mkldnn.flags(enabled=False):
    without_onednn = F.gelu(x.repeat(4))[:2]
print("x:             ", x.tolist())
print("one element:   ", alone.tolist())
print("eight elements:", among_others.tolist())
print("without oneDNN:", without_onednn.tolist())
is_as_described = (
    alone.equal(x)
    and without_onednn.equal(x)
    and among_others[0].isnan()
    and among_others[1].isinf()
)
sys.exit(0 if is_as_described else "gelu no longer depends on the number of elements")
PROGRAM
