#!/usr/bin/env bash
# heavyball 3.2.1: the first step of Scion replaces the parameters it is given: matrices by random
# orthogonal ones, and vectors by zeros, weights of layer norms too. So a trained model loses
# everything in its first step of fine-tuning, whatever the learning rate. Matrices of one shape in
# several groups become equal, as the seed is a parameter's place in its group. No error, no
# warning, nothing about it in its docstring; AdamW and Muon start from what they are given.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 heavyball==3.2.1
cat > "$folder/program.py" <<'PROGRAM'
import sys

import heavyball
import torch

heavyball.utils.compile_mode = None  # runs the same code without a compiler
torch.set_num_threads(1)


def trained_model():
    """Return a model that has learned a function, inputs and labels."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 1)
    )
    inputs = torch.randn(256, 8)
    labels = inputs[:, :1] * inputs[:, 1:2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(500):
        optimizer.zero_grad()
        (model(inputs) - labels).square().mean().backward()
        optimizer.step()
    return model, inputs, labels


is_as_described = True
for name in ("AdamW", "Muon", "Scion"):
    model, inputs, labels = trained_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = (model(inputs) - labels).square().mean()
    optimizer = getattr(heavyball, name)(model.parameters(), lr=1e-6)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        later = (model(inputs) - labels).square().mean()
    moved = max((p - q).abs().max().item() for p, q in zip(model.parameters(), before, strict=True))
    print(f"{name}: a step with a learning rate of 1e-6 moves parameters by up to", end=" ")
    print(f"{moved:.6f}; loss {loss.item():.4f} before, {later.item():.4f} after")
    print(f"    the layer norm's weight was about {before[2].mean():.2f}, is", end=" ")
    print(f"{model[1].weight.mean():.6f}")
    if name == "Scion":
        is_as_described &= moved > 0.1 and later.item() > 10 * loss.item()
        is_as_described &= model[1].weight.abs().max().item() < 1e-4
    else:
        is_as_described &= moved < 1e-4 and abs(later.item() - loss.item()) < 1e-3
twins = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(2)]
optimizer = heavyball.Scion([{"params": [twin]} for twin in twins], lr=1e-6)
for twin in twins:
    twin.grad = torch.randn(8, 8)
optimizer.step()
difference = (twins[0] - twins[1]).abs().max().item()
print(f"two matrices in groups of their own differ by up to {difference:.6f} after a step")
is_as_described &= difference < 1e-4
sys.exit(0 if is_as_described else "Scion starts from the parameters that it is given")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
