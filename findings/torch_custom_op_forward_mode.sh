#!/usr/bin/env bash
# torch 2.13.0: an operator of torch.library.custom_op with register_autograd has a gradient, but
# in forward mode (torch.func.jvp and jacfwd, torch.autograd.forward_ad) it is a constant: its
# derivative is 0. So a loss with a jvp in it, as of consistency models, drops what goes through the
# operator, and trains on something else. No error, no warning; torch.autograd.Function with the
# same backward raises an error that it has no jvp.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.autograd.forward_ad as forward_ad


@torch.library.custom_op("example::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def multiply_by_derivative(ctx, gradient):
    return 2 * ctx.saved_tensors[0] * gradient


square.register_autograd(multiply_by_derivative, setup_context=save_inputs)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * x

    setup_context = staticmethod(save_inputs)
    backward = staticmethod(multiply_by_derivative)


def derivatives(function, x, direction):
    """Return the derivative of the function's sum along a direction, in three ways."""
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf).sum(), leaf)
    _, of_func = torch.func.jvp(lambda value: function(value).sum(), (x,), (direction,))
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(x, direction)).sum()
        tangent = forward_ad.unpack_dual(dual).tangent
    reverse = (gradient * direction).sum().item()
    return reverse, of_func.item(), 0.0 if tangent is None else tangent.item()


x, direction = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 1.0])
is_as_described = True
for name, function in (("x * x", lambda value: value * value), ("custom_op", square)):
    reverse, of_func, of_dual = derivatives(function, x, direction)
    print(f"{name}: derivative of the sum by backward {reverse}, by jvp {of_func}, ", end="")
    print(f"by dual tensors {of_dual}")
    expected = 0.0 if name == "custom_op" else 12.0
    is_as_described &= (reverse, of_func, of_dual) == (12.0, expected, expected)
try:
    derivatives(Square.apply, x, direction)
    is_as_described = False
except RuntimeError as error:
    print(f"autograd.Function: {type(error).__name__}: {str(error).splitlines()[0]}")
sys.exit(0 if is_as_described else "a custom_op is no longer a constant in forward mode")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
