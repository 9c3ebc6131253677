#!/usr/bin/env bash
# torch 2.13.0, CPU: F.batch_norm with a weight that is not contiguous, as a column of a table with
# weights and biases or with a column for each domain, gives a wrong gradient of its input if that
# is a matrix or channels_last. Its backward takes the next numbers in memory for the weights. The
# output, and the gradients of the table, are right. So what comes before the layer is trained in a
# wrong direction, in training and evaluation mode, in fp32 and fp64. No error, no warning; for a
# copy of the column, contiguous(), and for images that are not channels_last it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F

torch.manual_seed(0)
CHANNELS = 8
table = torch.randn(CHANNELS, 2)  # a weight and a bias for each channel
images = torch.randn(4, CHANNELS, 3, 3)
inputs = {
    "matrix": torch.randn(6, CHANNELS),
    "images": images,
    "channels_last": images.contiguous(memory_format=torch.channels_last),
}


def results(x, training, copy):
    """Return the output, its gradient by the input and by the table."""
    x = x.detach().requires_grad_()
    parameters = table.clone().requires_grad_()
    weight, bias = parameters.unbind(1)
    if copy:
        weight, bias = weight.contiguous(), bias.contiguous()
    statistics = torch.zeros(CHANNELS), torch.ones(CHANNELS)
    output = F.batch_norm(x, *statistics, weight, bias, training)
    loss = (output * target_of(output)).sum()
    loss.backward()
    return output.detach(), x.grad, parameters.grad


def target_of(output):
    target = torch.linspace(-1, 1, output.numel()).sin().view(output.shape)
    return torch.empty_like(output).copy_(target)  # in the same order of memory


is_as_described = True
for name, x in inputs.items():
    for training in (True, False):
        of_column, of_copy = (results(x, training, copy) for copy in (False, True))
        errors = [
            ((one - other).norm() / other.norm()).item() for one, other in zip(of_column, of_copy)
        ]
        print(
            f"{name:13} training={training!s:5}: relative difference from the copy of output "
            f"{errors[0]:.1e}, gradient of input {errors[1]:.1e}, of table {errors[2]:.1e}"
        )
        is_as_described &= errors[0] < 1e-5 and errors[2] < 1e-5
        is_as_described &= errors[1] < 1e-5 if name == "images" else errors[1] > 0.1
sys.exit(0 if is_as_described else "the gradient of batch_norm with such a weight has changed")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
