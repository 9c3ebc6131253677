#!/usr/bin/env bash
# liger-kernel 0.8.5: LigerFusedLinearJSDLoss takes a teacher whose vocabulary is padded to a larger
# size than the student's. It gives the student logits of 0, not of minus infinity, for the tokens
# it does not have. These take part in the softmax: a student that is the teacher itself, without
# padding, has a loss and a gradient. No error, no warning; with equal sizes both are 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 liger-kernel==0.8.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

torch.manual_seed(0)
tokens, hidden_size, vocab_size, padded_size = 32, 16, 120, 128
hidden = torch.randn(tokens, hidden_size)
weight = 0.25 * torch.randn(vocab_size, hidden_size)
target = torch.randint(vocab_size, (tokens,))
# The teacher never predicts the tokens 120 to 127, which no text contains.
padded_weight = torch.zeros(padded_size, hidden_size)
padded_weight[:vocab_size] = weight
padded_bias = torch.zeros(padded_size)
padded_bias[vocab_size:] = -1e4


def soft_loss(teacher_weight, teacher_bias, beta):
    student = weight.clone().requires_grad_()
    loss_fn = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False
    )
    bias = torch.zeros(vocab_size)
    loss = loss_fn(hidden, student, hidden, teacher_weight, target, bias, teacher_bias)
    loss.backward()
    return loss.item(), student.grad.abs().max().item()


student_logits = (hidden @ weight.T).double()
teacher_logits = (hidden @ padded_weight.T + padded_bias).double()
difference = teacher_logits.softmax(-1)[:, :vocab_size] - student_logits.softmax(-1)
mass = teacher_logits.softmax(-1)[:, vocab_size:].sum(-1).max().item()
print(f"fp64: probabilities of student and teacher are at most {difference.abs().max():.1e} apart,")
print(f"    and the teacher gives padding a probability of {mass:.1e}")
is_as_described = mass == 0 and difference.abs().max().item() < 1e-12
# The student's own probability of its 120 tokens, if 8 more have a logit of 0.
kept = student_logits.exp().sum(-1)
expected = (torch.log(kept + padded_size - vocab_size) - torch.log(kept)).mean().item()
for beta in (0.0, 0.5):
    same, same_gradient = soft_loss(weight, torch.zeros(vocab_size), beta)
    loss, gradient = soft_loss(padded_weight, padded_bias, beta)
    print(f"beta {beta}, teacher of {vocab_size} tokens: loss {abs(same):.6f},", end=" ")
    print(f"gradient at most {same_gradient:.6f}")
    print(f"beta {beta}, teacher of {padded_size} tokens: loss {loss:.6f},", end=" ")
    print(f"gradient at most {gradient:.6f}")
    is_as_described &= max(abs(same), same_gradient) < 1e-6 and loss > 0.01 and gradient > 1e-4
    if beta == 0.0:
        print(f"    KL with 8 more tokens of logit 0, fp64: {expected:.6f}")
        is_as_described &= abs(loss - expected) < 1e-5
sys.exit(0 if is_as_described else "the student's missing tokens no longer have a probability")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
