#!/usr/bin/env bash
# torch-optimizer 0.3.0: Adahessian scales the step of a parameter by its own Hessian's diagonal,
# but that of a parameter with three dimensions (embeddings of positions [1, length, dim], say) by
# the diagonal of the parameter before it, wherever the shapes can be broadcast. Curvature of its
# own plays no part. No error, no warning (there is an error if it comes first or shapes differ).
# The same numbers as a matrix, without the leading dimension of 1, are as in the paper
# (2006.00719).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torch-optimizer==0.3.0
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch
import torch_optimizer

warnings.simplefilter("ignore")
torch.manual_seed(0)
length, dim = 4, 6
curvatures = [torch.full((dim,), 100.0), torch.rand(length, dim) + 0.5]


def first_steps(shape):
    """Return the parts of the way to the minimum that bias and positions go in their first step.

    The loss is a sum of parabolas, whose Hessian is diagonal, so that the estimate is exact and a
    step with lr=1 ends in the minimum.
    """
    bias = torch.nn.Parameter(torch.ones(dim))
    positions = torch.nn.Parameter(torch.ones(shape))
    parameters = [bias, positions]
    optimizer = torch_optimizer.Adahessian(parameters, lr=1.0, hessian_power=1.0, eps=1e-12)
    loss = 0
    for parameter, curvature in zip(parameters, curvatures, strict=True):
        loss = loss + 0.5 * (curvature * parameter**2).sum()
    loss.backward(create_graph=True)
    optimizer.step()
    return 1 - bias.detach(), 1 - positions.detach().view(length, dim)


is_as_described = True
for shape in ((length, dim), (1, length, dim)):
    of_bias, of_positions = first_steps(shape)
    print(f"positions of shape {shape}")
    print(f"    bias, curvature 100: {of_bias.min():.4f} to {of_bias.max():.4f} of its way")
    print(f"    positions, curvature 0.5 to 1.5: {of_positions.min():.4f}", end=" ")
    print(f"to {of_positions.max():.4f} of their way")
    own = torch.ones(length, dim) if len(shape) == 2 else curvatures[1] / curvatures[0]
    is_as_described &= torch.allclose(of_bias, torch.ones(dim), rtol=1e-4)
    is_as_described &= torch.allclose(of_positions, own, rtol=1e-4)
sys.exit(0 if is_as_described else "a parameter with three dimensions has its own curvature now")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
