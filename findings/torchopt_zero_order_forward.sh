#!/usr/bin/env bash
# torchopt 0.7.3: gradients of zero_order(method="forward") do not converge to the function's with
# more samples. The value at the parameters, which is to be subtracted from that of each sample, is
# overwritten by the first difference, so that later samples subtract the difference before them;
# the error stays as large as the gradient, and is larger than that of "naive". Besides, they are
# multiplied by sigma where the others divide by it. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchopt==0.7.3
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from torchopt.diff.zero_order import zero_order

slope = torch.tensor([2.0, -4.0, 1.0], dtype=torch.float64)
normal = torch.distributions.Normal(torch.zeros(()).double(), torch.ones(()).double())


def estimate(method, samples, sigma):
    """Estimate the gradient of a linear function, which is its slope."""

    @zero_order(normal, method=method, argnums=0, num_samples=samples, sigma=sigma)
    def function(x):
        return (slope * x).sum()

    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(function(x), x)[0]


def relative_error(method, samples):
    """Return the root of the mean square over 12 estimates with sigma=1."""
    torch.manual_seed(0)
    errors = [(estimate(method, samples, 1.0) - slope).square().sum() for _ in range(12)]
    return (torch.stack(errors).mean() / slope.square().sum()).sqrt().item()


print("error of an estimate over the gradient's norm, by the number of samples:")
errors = {}
for method in ("naive", "antithetic", "forward"):
    errors[method] = [relative_error(method, samples) for samples in (100, 1000, 4000)]
    numbers = " ".join(f"{error:.3f}" for error in errors[method])
    print(f"    {method:10} with 100, 1000 and 4000: {numbers}")
print("mean of 4000 estimates of one sample each, times the gradient:")
factors = {}
for sigma in (1.0, 0.1):
    for method in ("naive", "antithetic", "forward"):
        torch.manual_seed(0)
        mean = sum(estimate(method, 1, sigma) for _ in range(4000)) / 4000
        factors[method, sigma] = (mean @ slope / (slope @ slope)).item()
        print(f"    {method:10} sigma={sigma}: {factors[method, sigma]:.4f}")
is_as_described = errors["naive"][2] < 0.1 and errors["antithetic"][2] < 0.1
is_as_described &= min(errors["forward"]) > 0.5
is_as_described &= abs(factors["antithetic", 0.1] - 1) < 0.1
is_as_described &= abs(factors["forward", 0.1] / 0.01 - 1) < 0.1
sys.exit(0 if is_as_described else "the forward method now converges to the gradient")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
