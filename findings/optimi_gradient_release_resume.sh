#!/usr/bin/env bash
# torch-optimi 0.3.3: with gradient_release=True each parameter's state holds its parameter group,
# whose learning rate a step uses. It is saved with the rest, and load_state_dict puts a copy there.
# So after resuming a scheduler changes param_groups, but no step sees it: the learning rate stays
# as it was when saved, a warmup or decay stops. get_last_lr() reports another. No error, no
# warning; without gradient release resuming is exact, and with a constant rate too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 packaging==26.4 \
    torch-optimi==0.3.3
cat > "$folder/program.py" <<'PROGRAM'
import io
import sys

import torch
from optimi import AdamW, prepare_for_gradient_release

torch.set_num_threads(1)


def make(gradient_release, gamma):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = AdamW(model.parameters(), lr=0.1, gradient_release=gradient_release)
    if gradient_release:
        prepare_for_gradient_release(model, optimizer)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)


def train(gradient_release, gamma, resumed_step=None):
    """Return the weight after 20 steps, resumed from a checkpoint before the one named."""
    parts = make(gradient_release, gamma)
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        if step == resumed_step:
            checkpoint = io.BytesIO()
            torch.save([part.state_dict() for part in parts], checkpoint)
            checkpoint.seek(0)
            parts = make(gradient_release, gamma)
            states = torch.load(checkpoint, weights_only=False)
            for part, state in zip(parts, states, strict=True):
                part.load_state_dict(state)
        model, optimizer, scheduler = parts
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        if not gradient_release:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    used = optimizer.state[model.weight].get("group", optimizer.param_groups[0])["lr"]
    return model.weight.detach(), used, scheduler.get_last_lr()[0]


is_as_described = True
for gradient_release in (False, True):
    for gamma in (1.0, 0.8):
        weight, _, _ = train(gradient_release, gamma)
        resumed, used, reported = train(gradient_release, gamma, resumed_step=5)
        error = (weight - resumed).abs().max().item()
        print(f"{gradient_release=!s:5} rate times {gamma} in each step: resuming changes", end=" ")
        print(f"weights by up to {error:.6f};")
        print(f"    rates after 20 steps: used {used:.6f}, reported {reported:.6f}")
        if gradient_release and gamma != 1.0:
            is_as_described &= error > 0.01 and used > 10 * reported
        else:
            is_as_described &= error < 1e-6 and used == reported
sys.exit(0 if is_as_described else "a scheduler still works after resuming with gradient release")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
