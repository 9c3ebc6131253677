#!/usr/bin/env bash
# torch 2.13.0: Muon with nesterov=False of bf16 parameters divides its momentum by its own norm,
# in place, in each step. Gradients that are small beside 1, as most are, then hardly change it any
# more: it keeps the direction of the first ones, and the parameter goes on in it, against later
# gradients. No error, no warning; with nesterov=True, the default, and in fp32 it turns.
# (Computing the update it casts the momentum to bf16, which for bf16 gives the same tensor, and
# divides that. The authors know: pull request 194664 of pytorch/pytorch, later than this version.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch

torch.manual_seed(0)
gradient = torch.randn(16, 16) * 1e-4  # of norm 0.0016


def train(dtype, nesterov):
    """Return how far the parameter is along the gradient after 1, 50, 100 steps, and the norm."""
    weight = torch.nn.Parameter(torch.zeros(16, 16, dtype=dtype))
    optimizer = torch.optim.Muon([weight], lr=0.01, weight_decay=0.0, nesterov=nesterov)
    places = []
    for step in range(100):
        # The first gradient, and from then on its opposite.
        weight.grad = (gradient if step == 0 else -gradient).to(dtype)
        optimizer.step()
        if step in (0, 49, 99):
            places.append((weight.float() * gradient).sum().item() / gradient.norm().item())
    return places, optimizer.state[weight]["momentum_buffer"].float().norm().item()


is_as_described = True
for dtype in (torch.float32, torch.bfloat16):
    for nesterov in (True, False):
        places, norm = train(dtype, nesterov)
        print(
            f"{str(dtype):14} nesterov={nesterov!s:5}: after 1, 50, 100 steps at "
            f"{', '.join(f'{place:6.3f}' for place in places)}; norm of the momentum {norm:.4f}"
        )
        turns = places[0] < 0 < places[1] < places[2]
        goes_on = places[0] > places[1] > places[2]
        if dtype == torch.bfloat16 and not nesterov:
            is_as_described &= goes_on and 0.9 < norm < 1.1
        else:
            is_as_described &= turns and norm < 0.01
sys.exit(0 if is_as_described else "the momentum of Muon in bf16 has changed")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
