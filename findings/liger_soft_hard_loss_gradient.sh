#!/usr/bin/env bash
# liger-kernel 0.8.5: LigerFusedLinearJSDLoss and LigerFusedLinearCosineSimilarityLoss with
# return_soft_hard_loss=True also return the soft and the hard loss, and say that these require
# gradients. But backward of a sum of the two, as with weights of one's own, gives gradients that
# are all 0, where those of the first result, the same sum, are not. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 triton==3.7.1 numpy==2.3.5 liger-kernel==0.8.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from liger_kernel.chunked_loss import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSDLoss,
)

T, H, V = 6, 4, 8
torch.manual_seed(0)
student, teacher = torch.randn(2, T, H)
student_weight, teacher_weight = torch.randn(2, V, H)
labels = torch.randint(V, (T,))


def of_loss(loss_class, chosen):
    """Return a loss made of those returned, and its gradient by the student's weight."""
    function = loss_class(0.5, 0.5, compiled=False, return_soft_hard_loss=True)
    weight = student_weight.clone().requires_grad_()
    loss = chosen(*function(student, weight, teacher, teacher_weight, labels))
    loss.backward()
    return loss, weight.grad


is_as_described = True
for loss_class in (LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss):
    whole, kept = of_loss(loss_class, lambda whole, soft, hard: whole)
    parts, lost = of_loss(loss_class, lambda whole, soft, hard: 0.5 * soft + 0.5 * hard)
    print(loss_class.__name__)
    for name, loss, gradient in (
        ("as returned:         ", whole, kept),
        ("0.5 soft + 0.5 hard: ", parts, lost),
    ):
        largest = gradient.abs().max().item()
        print(f"    {name} {loss.item():.4f}, largest element of the gradient {largest:.4f}")
    is_as_described &= torch.allclose(whole, parts) and kept.abs().max() > 0.1
    is_as_described &= parts.requires_grad and lost.count_nonzero() == 0
sys.exit(0 if is_as_described else "the soft and hard losses now have gradients, or require none")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
