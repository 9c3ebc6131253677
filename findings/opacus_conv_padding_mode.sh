#!/usr/bin/env bash
# opacus 1.6.0: GradSampleModule's gradients of nn.Conv1d, nn.Conv2d and nn.Conv3d pad inputs with
# zeros whatever padding_mode is. The forward pass is right, and so is .grad; grad_sample, which
# DP-SGD trains with, is not that of the model. No error, no warning; force_functorch=True is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 opacus==1.6.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

import torch
from opacus import GradSampleModule

warnings.filterwarnings("ignore")
logging.disable()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
inputs = torch.randn(4, 3, 8, 8, 8)
kinds = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}


def make_layer(dimensions, mode):
    torch.manual_seed(1)
    return kinds[dimensions](3, 5, 3, padding=1, padding_mode=mode)


def largest_error(dimensions, mode, **options):
    """Compare the samples' gradients with those that autograd computes one by one."""
    x = inputs[(slice(None), slice(None), *[0] * (3 - dimensions))]
    wrapped = GradSampleModule(make_layer(dimensions, mode), loss_reduction="sum", **options)
    wrapped(x).square().sum().backward()
    expected = []
    for sample in x:
        layer = make_layer(dimensions, mode)
        layer(sample[None]).square().sum().backward()
        expected.append(layer.weight.grad)
    expected = torch.stack(expected)
    summed = wrapped._module.weight.grad
    assert torch.allclose(summed, expected.sum(0)), "the gradient of all samples is wrong"
    error = wrapped._module.weight.grad_sample - expected
    return (error.abs().max() / expected.abs().max()).item()


is_as_described = True
print("error of a sample's gradient over the largest gradient:")
for dimensions, kind in kinds.items():
    for mode in ("zeros", "circular", "reflect", "replicate"):
        error = largest_error(dimensions, mode)
        functorch = largest_error(dimensions, mode, force_functorch=True)
        print(f"    {kind.__name__} {mode:10} {error:.1e}, with functorch {functorch:.1e}")
        is_wrong = error > 1e-2
        is_as_described &= functorch < 1e-9
        is_as_described &= is_wrong == (mode != "zeros")
        is_as_described &= is_wrong or error < 1e-9
sys.exit(0 if is_as_described else "padding_mode is no longer ignored")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
