#!/usr/bin/env bash
# captum 0.9.0: with method="riemann_trapezoid", attributions by integrated gradients (of layers,
# too) are too small by 1 / n_steps, 2% by default. Its n points from 0 to 1 bound n - 1 intervals,
# but each counts as 1 / n, so the steps add up to 1 - 1 / n. Of a linear model, where every rule of
# integration is exact, all other methods are exact; of others it converges more slowly than
# riemann_left. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 captum==0.9.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from captum.attr import IntegratedGradients, LayerIntegratedGradients

torch.manual_seed(0)
METHODS = ("gausslegendre", "riemann_middle", "riemann_left", "riemann_right", "riemann_trapezoid")
linear = torch.nn.Linear(5, 1, bias=False).double()
smooth = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
x, baseline = torch.randn(1, 5).double(), torch.randn(1, 5).double()


def sum_and_change(attribution, model, method, n_steps):
    """Return the attributions' sum over the change of the model's output, which it should be."""
    values = attribution.attribute(x, baseline, method=method, n_steps=n_steps)
    return (values.sum() / (model(x) - model(baseline))).item()


is_as_described = True
print("sum of attributions over the change of the output")
for method in METHODS:
    ratio = sum_and_change(IntegratedGradients(linear), linear, method, 50)
    of_layer = LayerIntegratedGradients(smooth, smooth[0])
    layer_ratio = sum_and_change(of_layer, smooth, method, 50)
    errors = {
        n_steps: abs(sum_and_change(IntegratedGradients(smooth), smooth, method, n_steps) - 1)
        for n_steps in (50, 200)
    }
    print(f"    {method:17} of a linear model: {ratio:.6f}, a layer: {layer_ratio:.6f};", end=" ")
    print("off by", ", ".join(f"{error:.1e} in {n} steps" for n, error in errors.items()))
    if method == "riemann_trapezoid":
        is_as_described &= abs(ratio - (1 - 1 / 50)) < 1e-6 and abs(layer_ratio - 0.98) < 5e-3
        is_as_described &= abs(errors[200] - 1 / 200) < 5e-4
    else:
        is_as_described &= abs(ratio - 1) < 1e-6
true_rule = torch.full((50,), 1 / 49).double()
true_rule[[0, -1]] /= 2
print(f"steps of a trapezoidal rule with 50 points add up to {true_rule.sum():.6f}")
sys.exit(0 if is_as_described else "the steps of riemann_trapezoid now add up to 1")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
