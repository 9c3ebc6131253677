#!/usr/bin/env bash
# ai2-olmo-core 3.0.0: LMHead, and CrossEntropyLoss, take z_loss_multiplier=0.0 for 1e-4: the z-loss
# that was to be turned off is added, and trained, at what is a usual strength. A sweep of weights
# from 0 on has no run without it. No error, no warning; None turns it off, and cross_entropy_loss,
# which both call, takes 0.0 for 0.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 ai2-olmo-core==3.0.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from olmo_core.nn.cross_entropy_loss import CrossEntropyLoss
from olmo_core.nn.functional import cross_entropy_loss
from olmo_core.nn.lm_head import LMHeadConfig

torch.manual_seed(0)
batch, length, hidden_size, vocab_size = 2, 5, 16, 64
head = LMHeadConfig().build(d_model=hidden_size, vocab_size=vocab_size)
hidden = torch.randn(batch, length, hidden_size)
labels = torch.randint(vocab_size, (batch, length))
logits = head(hidden).detach()
mean_square = logits.double().logsumexp(-1).square().mean().item()


def of_head(multiplier):
    states = hidden.clone().requires_grad_()
    output = head(states, labels=labels, z_loss_multiplier=multiplier)
    z_loss = 0.0 if output.z_loss is None else output.z_loss.item()
    return z_loss, torch.autograd.grad(output.loss, states)[0]


def of_module(multiplier):
    _, z_loss = CrossEntropyLoss(z_loss_multiplier=multiplier)(logits, labels)
    return 0.0 if z_loss is None else z_loss.item()


def of_function(multiplier):
    _, z_loss = cross_entropy_loss(
        logits.flatten(0, 1), labels.flatten(), compute_z_loss=True, z_loss_multiplier=multiplier
    )
    return z_loss.item()


_, without = of_head(None)
is_as_described = True
for multiplier in (1e-2, 1e-3, 1e-4, 0.0):
    z_loss, gradient = of_head(multiplier)
    change = (gradient - without).abs().max().item()
    expected = multiplier * mean_square
    module, function = of_module(multiplier), of_function(multiplier)
    print(f"z_loss_multiplier={multiplier}: z-loss expected {expected:.8f}")
    print(f"    LMHead {z_loss:.8f}, which changes the gradient by up to {change:.8f}")
    print(f"    CrossEntropyLoss {module:.8f}, cross_entropy_loss {function:.8f}")
    is_as_described &= abs(function - expected) < 1e-6
    if multiplier == 0:
        is_as_described &= abs(z_loss / mean_square - 1e-4) < 1e-8 and z_loss == module
        is_as_described &= change > 1e-7
    else:
        is_as_described &= abs(z_loss - expected) < 1e-6 and abs(module - expected) < 1e-6
sys.exit(0 if is_as_described else "a multiplier of 0 now turns the z-loss off")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
