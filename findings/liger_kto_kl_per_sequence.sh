#!/usr/bin/env bash
# liger-kernel 0.8.5: LigerFusedLinearKTOLoss takes kl "of shape (batch_size,)", but does not split
# it into chunks with the sequences. With the default chunk_size=1 each sequence is compared with
# the KL divergences of all, so that loss and gradient come out about batch_size times as large. No
# error, no warning; with one chunk of the whole batch, and with a scalar, they are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 triton==3.7.1 numpy==2.3.5 liger-kernel==0.8.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from liger_kernel.chunked_loss import LigerFusedLinearKTOLoss

B, T, H, V = 4, 5, 8, 16
BETA = 0.1
torch.manual_seed(0)
hidden, reference_hidden = torch.randn(2, B, T, H)
weight, reference_weight = torch.randn(2, V, H)
labels = torch.randint(V, (B, T))
is_chosen = torch.tensor([True, False, True, False])


def log_probabilities(hidden, weight):
    per_token = (hidden @ weight.t()).log_softmax(-1).gather(-1, labels[..., None])
    return per_token.sum((1, 2))


def by_formula(hidden, kl):
    reference = log_probabilities(reference_hidden, reference_weight)
    ratios = log_probabilities(hidden, weight) - reference
    return (1 - torch.sigmoid(BETA * (ratios - kl) * torch.where(is_chosen, 1, -1))).mean()


def by_liger(hidden, kl, **options):
    function = LigerFusedLinearKTOLoss(beta=BETA, compiled=False, use_ref_model=True, **options)
    loss, *_ = function(
        hidden, weight, labels, preference_labels=is_chosen, ref_input=reference_hidden,
        ref_weight=reference_weight, kl=kl,
    )
    return loss


def with_gradient(loss_of, *arguments, **options):
    """Return the loss and its gradient by the hidden states."""
    leaf = hidden.clone().requires_grad_()
    loss = loss_of(leaf, *arguments, **options)
    loss.backward()
    return loss.detach(), leaf.grad


is_as_described = True
for name, kl in (
    ("a scalar, 0.7", torch.tensor(0.7)),
    ("0.7 for each sequence", torch.full((B,), 0.7)),
    ("0, 2, 5 and 9", torch.tensor([0.0, 2.0, 5.0, 9.0])),
):
    print(f"kl: {name}, batch of {B}")
    expected, expected_gradient = with_gradient(by_formula, kl)
    print(f"    formula:            loss {expected:.4f}, norm of gradient", end=" ")
    print(f"{expected_gradient.norm():.4f}")
    for setting, options in (("default chunk_size", {}), (f"chunk_size={B}", {"chunk_size": B})):
        loss, gradient = with_gradient(by_liger, kl, **options)
        print(f"    {setting + ':':19s} loss {loss:.4f}, norm of gradient {gradient.norm():.4f}")
        if options or kl.ndim == 0:
            is_as_described &= torch.allclose(loss, expected, rtol=1e-4)
            is_as_described &= torch.allclose(gradient, expected_gradient, rtol=1e-3, atol=1e-6)
        else:
            is_as_described &= loss > (B - 1) * expected
            is_as_described &= gradient.norm() > (B - 1) * expected_gradient.norm()
sys.exit(0 if is_as_described else "kl of each sequence no longer multiplies the loss")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
