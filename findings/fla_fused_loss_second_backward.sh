#!/usr/bin/env bash
# fla-core 0.6.0: the backward of FusedLinearCrossEntropyLoss and FusedKLDivLoss multiplies the
# gradients that forward has made by the upstream gradient in place, where they are saved. A second
# backward of the same graph (retain_graph=True, as weighting losses by their gradients' norms
# needs) multiplies them again: of a loss with weight 0.1 it is a tenth of the gradient. And what
# torch.autograd.grad returned for the first is changed too. No error, no warning; with an upstream
# gradient of 1 it is right. Shown on a CPU in Triton's interpreter.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 triton==3.7.1 \
    packaging==26.4 fla-core==0.6.0
cat > "$folder/program.py" <<'PROGRAM'
import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from fla.modules.fused_kl_div import FusedKLDivLoss  # noqa: E402
from fla.modules.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss  # noqa: E402

torch.manual_seed(0)
torch.set_num_threads(1)
TOKENS, HIDDEN, VOCAB_SIZE = 12, 16, 40
hidden, teacher_hidden = torch.randn(2, TOKENS, HIDDEN)
weight, teacher_weight = torch.randn(2, VOCAB_SIZE, HIDDEN)
labels = torch.randint(VOCAB_SIZE, (TOKENS,))
teacher = (teacher_hidden @ teacher_weight.T).softmax(-1)
LOSSES = {
    "torch's cross entropy": lambda h, w: F.cross_entropy(h @ w.T, labels),
    "FusedLinearCrossEntropyLoss": lambda h, w: FusedLinearCrossEntropyLoss()(h, labels, w),
    "torch's KL divergence": lambda h, w: F.kl_div(
        (h @ w.T).log_softmax(-1), teacher, reduction="batchmean"
    ),
    "FusedKLDivLoss": lambda h, w: FusedKLDivLoss()(h, teacher_hidden, w, teacher_weight),
}


def norms(loss_of, scale):
    """Return norms of the gradient of scale * loss: of a first backward, that later, a second."""
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = scale * loss_of(*leaves)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    before = sum(gradient.square().sum() for gradient in first).sqrt().item()
    second = torch.autograd.grad(loss, leaves)
    return before, *(sum(g.square().sum() for g in gs).sqrt().item() for gs in (first, second))


is_as_described = True
for scale in (1.0, 0.1):
    print(f"norms of the gradient of {scale} * loss")
    for name, loss_of in LOSSES.items():
        first, first_later, second = norms(loss_of, scale)
        print(f"    {name:27}: first backward {first:.6f}, the same tensors after", end=" ")
        print(f"a second {first_later:.6f}, second backward {second:.6f}")
        if name.startswith("torch") or scale == 1.0:
            is_as_described &= abs(first_later / first - 1) + abs(second / first - 1) < 1e-4
        else:
            is_as_described &= abs(second / first - scale) < 1e-4
            is_as_described &= abs(first_later / first - scale) < 1e-4
sys.exit(0 if is_as_described else "a second backward gives the same gradient as the first")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
