#!/usr/bin/env bash
# torch 2.13.0, CPU: F.cross_entropy and F.nll_loss of fp16 logits add the losses, and the number of
# tokens, in fp16 before they divide. So the mean of 10000 losses of about 9 is inf. From 65520
# tokens on, also where each loss is small, their number is inf too: the mean is 0 or NaN, and all
# gradients are exactly 0, so that nothing is trained. No error, no warning. Mean and gradients of
# the same losses by reduction="none" and mean() are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import math
import sys

import torch
import torch.nn.functional as F


def mean_and_gradient(logits, labels, dtype, is_by_none):
    leaf = logits.to(dtype).requires_grad_()
    losses = F.cross_entropy(leaf, labels, reduction="none" if is_by_none else "mean")
    mean = losses.mean()
    (gradient,) = torch.autograd.grad(1024 * mean, leaf)  # with a loss scale
    return mean.item(), gradient.double()


torch.manual_seed(0)
is_as_described = True
for tokens, is_easy in ((2000, False), (10_000, False), (66_000, False), (66_000, True)):
    logits = (6 * torch.randn(tokens, 8)).half()
    # Labels that are mostly predicted have small losses, whose sum fits into fp16.
    labels = logits.argmax(1) if is_easy else torch.randint(8, (tokens,))
    right, right_gradient = mean_and_gradient(logits, labels, torch.float64, False)
    print(f"{tokens} tokens in fp16, mean loss {right:.4f}")
    for is_by_none in (False, True):
        mean, gradient = mean_and_gradient(logits, labels, torch.float16, is_by_none)
        error = ((gradient - right_gradient).norm() / right_gradient.norm()).item()
        name = 'by "none" and mean()' if is_by_none else 'by reduction "mean"'
        print(f"    {name:20} {mean:.4f}, error of the gradient {error:.1%}")
        is_right = abs(mean - right) < 0.01 * right
        if is_by_none or tokens == 2000:
            is_as_described &= is_right and error < 0.01
        elif tokens == 10_000:
            is_as_described &= math.isinf(mean) and error < 0.01
        else:
            is_as_described &= mean == 0 if is_easy else math.isnan(mean)
            is_as_described &= not gradient.any()
sys.exit(0 if is_as_described else "cross_entropy of fp16 logits no longer adds in fp16")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
