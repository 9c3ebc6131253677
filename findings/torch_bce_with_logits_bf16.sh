#!/usr/bin/env bash
# torch 2.13.0: F.binary_cross_entropy_with_logits, documented as more stable than sigmoid and
# binary_cross_entropy, loses its value for negatives in bf16 and fp16. It computes (1 - target) * x
# - log_sigmoid(x), which for target 0 is x less almost x: in bf16 the loss of logit -5 is 0, of -4
# 0.031, where 0.0067 and 0.018 are right. Of the mirrored logits 5 and 4 with target 1 it is right,
# as it is of both by sigmoid and binary_cross_entropy. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F


def losses(logits):
    """Return the losses of logits with target 0, and of -logits with target 1, in fp64."""
    zeros, ones = torch.zeros_like(logits), torch.ones_like(logits)
    results = {
        "with_logits, negatives": F.binary_cross_entropy_with_logits(
            logits, zeros, reduction="none"
        ),
        "with_logits, mirrored": F.binary_cross_entropy_with_logits(
            -logits, ones, reduction="none"
        ),
        "sigmoid and bce, negatives": F.binary_cross_entropy(
            logits.sigmoid(), zeros, reduction="none"
        ),
    }
    return {name: result.double() for name, result in results.items()}


is_as_described = True
torch.manual_seed(0)
few = torch.tensor([-2.0, -3.0, -4.0, -5.0, -6.0])  # exact in each type
many = 1.5 * torch.randn(100_000) - 5
for dtype in (torch.bfloat16, torch.float16):
    expected = F.softplus(few.double())
    print(f"{dtype}, logits {few.tolist()}")
    print(f"    {'right':27} {[round(value, 5) for value in expected.tolist()]}")
    for name, got in losses(few.to(dtype)).items():
        print(f"    {name:27} {[round(value, 5) for value in got.tolist()]}")
        error = ((got - expected) / expected).abs().max().item()
        is_as_described &= error > 0.5 if name == "with_logits, negatives" else error < 0.01
    logits = many.to(dtype)
    expected_mean = F.softplus(logits.double()).mean().item()
    means = {name: got.mean().item() for name, got in losses(logits).items()}
    print(f"    mean of 100000 with logits around -5: right {expected_mean:.5f}", end="")
    print("".join(f", {name} {mean:.5f}" for name, mean in means.items()))
    if dtype == torch.bfloat16:
        is_as_described &= abs(means["with_logits, negatives"] / expected_mean - 1) > 0.05
    is_as_described &= abs(means["with_logits, mirrored"] / expected_mean - 1) < 0.01
sys.exit(0 if is_as_described else "binary_cross_entropy_with_logits now keeps small losses")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
