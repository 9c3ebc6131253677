#!/usr/bin/env bash
# torch 2.13.0: F.cosine_embedding_loss of fp16 vectors multiplies the squares of their two lengths.
# From a length of 16 on, as of 256 numbers of size 1, that is inf, and the cosine is 0, whatever
# the vectors: pairs that are to be similar all cost 1 and get no gradient, others never cost
# anything. No error, no warning; F.cosine_similarity of the same vectors is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F


def by_loss(x, y, target):
    targets = torch.full((len(x),), target)
    return F.cosine_embedding_loss(x, y, targets)


def by_similarity(x, y, target):
    cosines = F.cosine_similarity(x, y)
    return (1 - cosines if target == 1 else cosines.clamp(min=0)).mean()


def loss_and_gradient_norm(function, x, y, target, dtype):
    leaf = x.to(dtype).requires_grad_()
    loss = function(leaf, y.to(dtype), target)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient.double().norm().item()


torch.manual_seed(0)
is_as_described = True
for size in (64, 768, 4096):
    x = torch.randn(8, size).half()
    y = (x + 0.5 * torch.randn(8, size)).half()
    print(f"vectors of {size} numbers, lengths about {x.float().norm(dim=1).mean():.0f}, in fp16")
    for target in (1, -1):
        right = loss_and_gradient_norm(by_loss, x, y, target, torch.float64)
        print(f"    target {target}: right loss {right[0]:.4f}, gradient's norm {right[1]:.5f}")
        for function in (by_similarity, by_loss):
            got = loss_and_gradient_norm(function, x, y, target, torch.float16)
            print(f"        {function.__name__:13} {got[0]:.4f}, {got[1]:.5f}")
            is_right = all(abs(a - b) < 0.02 * b for a, b in zip(got, right))
            if function is by_loss and size > 64:
                is_as_described &= got == (1.0 if target == 1 else 0.0, 0.0)
            else:
                is_as_described &= is_right
sys.exit(0 if is_as_described else "cosine_embedding_loss of fp16 no longer overflows")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
