#!/usr/bin/env bash
# axolotl 0.19.0: the loss by which its KD trainer distills multiplies the divergence by
# kd_temperature squared, but not its gradient. So at temperature T the gradient of the teacher's
# part is 1 / T^2 of the derivative of the loss that is reported, and weighs that much less beside
# the labels' part than kd_alpha and kd_ce_alpha say. The square is there to keep the two in
# proportion at any T. At T = 1 all is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# all that axolotl asks for would be gigabytes; of its pinned versions, the loss imports these
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.16.1 \
    peft==0.20.0 accelerate==1.13.0 liger-kernel==0.8.1 pydantic==2.12.5 addict==2.4.0
"$folder/venv/bin/pip" install --quiet --no-deps axolotl==0.19.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from axolotl.integrations.kd.kernels import LigerFusedLinearKLTopKLogprobLoss

batch, length, hidden_size, vocab_size, top = 2, 6, 8, 32, 4
torch.manual_seed(0)
weight = torch.randn(vocab_size, hidden_size, dtype=torch.double)
hidden = torch.randn(batch, length, hidden_size, dtype=torch.double)
labels = torch.randint(vocab_size, (batch, length))
direction = torch.randn_like(hidden)
teacher = torch.randn(batch, length, vocab_size)
mask = torch.ones(batch, length, top)


def losses_of(temperature, of_labels, of_teacher):
    """Return the function from hidden states to the loss of the trainer."""
    scores, ids = (teacher / temperature).topk(top)
    log_probabilities = scores.log_softmax(-1)
    loss_fn = LigerFusedLinearKLTopKLogprobLoss(
        of_labels, of_teacher, temperature, beta=0.0, compiled=False
    )
    return lambda states: loss_fn(weight, states, ids, log_probabilities, mask, labels)


is_as_described = True
for of_labels, of_teacher in ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5)):
    print(f"kd_ce_alpha={of_labels}, kd_alpha={of_teacher}: derivative along a direction")
    for temperature in (1.0, 2.0, 4.0):
        loss = losses_of(temperature, of_labels, of_teacher)
        step = 1e-3
        difference = loss(hidden + step * direction) - loss(hidden - step * direction)
        expected = difference.item() / (2 * step)
        states = hidden.clone().requires_grad_()
        loss(states).backward()
        derivative = (states.grad * direction).sum().item()
        print(f"    T = {temperature}: of the loss {expected:9.5f}, by backward {derivative:9.5f}")
        if of_teacher == 0 or temperature == 1:
            is_as_described &= abs(derivative / expected - 1) < 0.01
        elif of_labels == 0:
            is_as_described &= abs(derivative / expected * temperature**2 - 1) < 0.01
        else:
            is_as_described &= abs(derivative / expected - 1) > 0.05
sys.exit(0 if is_as_described else "the gradient now has the square of the temperature")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
