#!/usr/bin/env bash
# composer (mosaicml) 0.32.1: apply_gradient_clipping(clipping_type="adaptive"), and the algorithm
# GradientClipping that calls it, scales each gradient to at most threshold times the norm of its
# weights, "as described in Brock et al, 2021". There (arXiv:2102.06171) the norm is at least 1e-3,
# so that parameters that begin as zeros are trained; here it is not bounded. So such parameters
# (biases, the second matrix of LoRA, an output layer that is set to zero) get a gradient of exactly
# 0 at every step, and stay 0. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.7.0 numpy==2.2.6 mosaicml==0.32.1
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

import torch

warnings.filterwarnings("ignore")
logging.disable()
from composer.functional import apply_gradient_clipping  # noqa: E402

THRESHOLD, EPSILON, STEPS = 0.01, 1e-3, 200


class LowRank(torch.nn.Module):
    """A frozen layer with low-rank updates, the second of which is zero at first, and a bias."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(16, 8, bias=False).requires_grad_(False)
        self.first = torch.nn.Linear(16, 4, bias=False)
        self.second = torch.nn.Linear(4, 8)
        torch.nn.init.zeros_(self.second.weight)
        torch.nn.init.zeros_(self.second.bias)

    def forward(self, inputs):
        return self.frozen(inputs) + self.second(self.first(inputs))


def clip_as_in_the_paper(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dims = tuple(range(1, parameter.ndim)) or 0
            options = dict(dim=dims, keepdim=parameter.ndim > 1)
            norm = torch.linalg.vector_norm(parameter.detach(), **options).clamp(min=EPSILON)
            gradient_norm = torch.linalg.vector_norm(parameter.grad, **options)
            parameter.grad *= (THRESHOLD * norm / gradient_norm).clamp(max=1)


def train(clip):
    """Return the losses of the first and the last step, and the largest weights that were 0."""
    torch.manual_seed(0)
    model = LowRank()
    inputs = torch.randn(64, 16)
    targets = inputs @ torch.randn(16, 8) + 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        clip(model)
        optimizer.step()
        losses.append(loss.item())
    weight, bias = model.second.weight, model.second.bias
    return losses[0], losses[-1], weight.abs().max().item(), bias.abs().max().item()


def clip_of_composer(clipping_type):
    return lambda model: apply_gradient_clipping(model, clipping_type, THRESHOLD, False)


is_as_described = True
for name, clip in (
    ("no clipping", lambda model: None),
    ("composer's, 'norm'", clip_of_composer("norm")),
    ("the paper's, adaptive", clip_as_in_the_paper),
    ("composer's, 'adaptive'", clip_of_composer("adaptive")),
):
    first, last, weight, bias = train(clip)
    print(f"{name:22}: loss {first:.3f} -> {last:.3f} in {STEPS} steps;", end=" ")
    print(f"of what was 0, largest weight {weight:.4f}, largest bias {bias:.4f}")
    if "'adaptive'" in name:
        is_as_described &= last == first and weight == 0 and bias == 0
    else:
        is_as_described &= last < 0.8 * first and weight > 0.1 and bias > 0.1
sys.exit(0 if is_as_described else "parameters that begin as zeros are now trained")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
