#!/usr/bin/env bash
# torchdistill 1.1.5: KDLoss says that it is alpha * L_CE + (1 - alpha) * tau^2 * L_KL, with beta,
# if given, in place of 1 - alpha. For alpha = 0, that is, distillation alone, it returns L_KL
# without tau^2 and without beta: with temperature 4 the loss and its gradient are 16 times smaller
# than for alpha = 1e-9, and beta has no effect. The same without labels, for any alpha.
# LogitStdKDLoss does it, too. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchdistill==1.1.5
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import torch
from torchdistill.losses.mid_level import KDLoss, LogitStdKDLoss

print("torch", torch.__version__, "torchdistill", version("torchdistill"))
torch.manual_seed(0)
student, teacher = 3 * torch.randn(2, 16, 10, dtype=torch.float64)
labels = torch.randint(10, (16,))
temperature = 4.0


def loss_and_gradient(kind, labels=labels, **weights):
    """Return the loss of the student's logits and the norm of its gradient."""
    criterion = kind("logits", "output", "logits", "output", temperature=temperature, **weights)
    logits = student.clone().requires_grad_()
    loss = criterion(
        {"logits": {"output": logits}}, {"logits": {"output": teacher}}, targets=labels
    )
    loss.backward()
    return torch.stack((loss.detach(), logits.grad.norm()))


is_as_described = True
for kind in (KDLoss, LogitStdKDLoss):
    almost = loss_and_gradient(kind, alpha=1e-9)
    cases = {
        "alpha 0": loss_and_gradient(kind, alpha=0.0),
        "alpha 0, beta 1": loss_and_gradient(kind, alpha=0.0, beta=1.0),
        "alpha 0, beta 0.1": loss_and_gradient(kind, alpha=0.0, beta=0.1),
        "alpha 1e-9, no labels": loss_and_gradient(kind, labels=None, alpha=1e-9),
    }
    print(kind.__name__)
    print(f"    {'alpha 1e-9':22} loss {almost[0]:.4f}, gradient {almost[1]:.5f}")
    for name, numbers in cases.items():
        print(f"    {name:22} loss {numbers[0]:.4f}, gradient {numbers[1]:.5f}", end="")
        print(f", {almost[0] / numbers[0]:.2f} times less")
        is_as_described &= torch.allclose(temperature**2 * numbers, almost, rtol=1e-6)
    tenth = loss_and_gradient(kind, alpha=1e-9, beta=0.1)
    print(f"    {'alpha 1e-9, beta 0.1':22} loss {tenth[0]:.4f}, gradient {tenth[1]:.5f}")
    is_as_described &= torch.allclose(10 * tenth, almost, rtol=1e-6)
sys.exit(0 if is_as_described else "alpha = 0 now is the limit of small alpha")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
