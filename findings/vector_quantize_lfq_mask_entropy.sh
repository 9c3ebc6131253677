#!/usr/bin/env bash
# vector-quantize-pytorch 1.32.0: LFQ's auxiliary loss is the mean entropy of single tokens minus
# that of the mean over all tokens, which is to keep all codes in use. With a mask it takes no mean:
# the second term becomes equal to the first, so that the loss is 0 (with diversity_gamma=1, the
# default), whatever the codes are, and so is its gradient. No error, no warning; without a mask, it
# is right, and a mask that is True everywhere should change nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 vector-quantize-pytorch==1.32.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from vector_quantize_pytorch import LFQ

torch.set_num_threads(1)
LENGTH = 12


def entropy(probabilities):
    return -(probabilities * probabilities.clamp(min=1e-9).log()).sum(-1)


def by_hand(quantizer, inputs):
    """Return the entropy loss of inputs of shape (tokens, 4), without mask."""
    probabilities = (2 * inputs @ quantizer.codebook.T).softmax(-1)
    return (entropy(probabilities).mean() - entropy(probabilities.mean(0))).item()


is_as_described = True
for name, scale, shift in (("spread inputs", 1.0, 0.0), ("inputs that all get one code", 0.1, 1.0)):
    torch.manual_seed(0)
    quantizer = LFQ(
        dim=4, codebook_size=16, entropy_loss_weight=1.0, commitment_loss_weight=0.0
    ).train()
    inputs = shift + scale * torch.randn(2, LENGTH, 4)
    all_true = torch.ones(2, LENGTH, dtype=torch.bool)
    some_true = all_true.clone()
    some_true[:, 8:] = False
    print(f"{name}:")
    for mask, kept in ((None, inputs), (all_true, inputs), (some_true, inputs[:, :8])):
        leaf = inputs.clone().requires_grad_()
        loss = quantizer(leaf, inv_temperature=1.0, mask=mask).entropy_aux_loss
        loss.backward()
        expected = by_hand(quantizer, kept.reshape(-1, 4))
        counted = "no mask" if mask is None else f"{mask.sum()} of {mask.numel()} tokens"
        print(f"    {counted}: a loss of {loss.item():.4f}, by hand {expected:.4f},", end=" ")
        print(f"norm of the gradient {leaf.grad.norm().item():.1e}")
        if mask is None:
            is_as_described &= abs(loss.item() - expected) < 1e-4 and leaf.grad.norm() > 1e-4
        else:
            is_as_described &= abs(loss.item()) < 1e-6 and leaf.grad.norm() < 1e-6
            is_as_described &= abs(expected) > 0.005
sys.exit(0 if is_as_described else "LFQ's entropy loss is no longer 0 with a mask")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
