#!/usr/bin/env bash
# torchdistill 1.1.5: SPKDLoss, the loss of "Similarity-Preserving Knowledge Distillation" (Tung and
# Mori, ICCV 2019, which its docstring names), divides each row of the similarity matrices by its L1
# norm. Equations 2 and 3 of the paper divide by the L2 norm. The loss of an ordinary batch is
# smaller by more than the batch size, the gradient has another direction, and a row whose
# similarities have other signs is weighted differently. The 1 in normalize(matrix, 1) is taken as
# p, not as the dimension.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchdistill==1.1.5
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import torch
from torchdistill.losses.mid_level import SPKDLoss

print("torch", torch.__version__, "torchdistill", version("torchdistill"))


def loss_of_paper(student, teacher, order):
    """Return equation 4 of the paper, with rows divided by their norm of this ``order``."""
    matrices = []
    for features in (student, teacher):
        similarities = features @ features.T
        matrices.append(similarities / similarities.norm(p=order, dim=1, keepdim=True))
    return (matrices[0] - matrices[1]).square().sum() / len(student) ** 2


def loss_of_torchdistill(student, teacher):
    """Return SPKDLoss of these features."""
    return criterion({"features": {"output": student}}, {"features": {"output": teacher}})


def loss_and_gradient(function, student, *arguments):
    """Return the loss of ``student`` and its gradient."""
    student = student.clone().requires_grad_()
    loss = function(student, *arguments)
    loss.backward()
    return loss.item(), student.grad.flatten()


criterion = SPKDLoss("features", "features", reduction="batchmean")
is_as_described = True
for batch_size in (8, 32, 128):
    torch.manual_seed(0)
    student, teacher = torch.randn(2, batch_size, 16, dtype=torch.float64)
    loss, gradient = loss_and_gradient(loss_of_torchdistill, student, teacher)
    expected, expected_gradient = loss_and_gradient(loss_of_paper, student, teacher, 2)
    of_l1_norm, _ = loss_and_gradient(loss_of_paper, student, teacher, 1)
    cosine = torch.cosine_similarity(gradient, expected_gradient, dim=0).item()
    print(f"batch of {batch_size}")
    print(f"    SPKDLoss:                {loss:.3e}")
    print(f"    the paper's, L2 norms:   {expected:.3e}, {expected / loss:.1f} times")
    print(f"    with L1 norms instead:   {of_l1_norm:.3e}")
    print(f"    cosine of the gradients: {cosine:.3f}")
    is_as_described &= abs(loss / of_l1_norm - 1) < 1e-9
    is_as_described &= expected / loss > batch_size / 3 and cosine < 0.99
sys.exit(0 if is_as_described else "SPKDLoss now divides by L2 norms")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
