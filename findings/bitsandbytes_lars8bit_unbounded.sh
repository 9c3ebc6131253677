#!/usr/bin/env bash
# bitsandbytes 0.50.2: LARS8bit takes max_unorm, "the maximum gradient norm", and ignores it, so it
# is SGD with momentum of 8 bits, to the bit: no step is bounded by the norm of its weights, and
# with the default of 0.02 the first is 500 times as long as that of LARS32bit here. The sibling
# LAMB8bit says that it does not bound steps, and refuses other values. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 bitsandbytes==0.50.2
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

warnings.filterwarnings("ignore")
logging.disable()
import bitsandbytes as bnb  # noqa: E402
import torch  # noqa: E402

torch.manual_seed(0)
weights = 0.1 * torch.randn(64, 128)
gradients = torch.randn(8, 64, 128)
learning_rate, momentum = 0.01, 0.9


def train(kind, steps, **options):
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = kind([parameter], lr=learning_rate, momentum=momentum, **options)
    for gradient in gradients[:steps]:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def length_of_first(kind, **options):
    return (train(kind, 1, **options) - weights).norm().item()


sgd = train(bnb.optim.SGD8bit, 8)
first = length_of_first(bnb.optim.SGD8bit)
print(f"SGD8bit: first step {first:.5f}")
is_as_described = True
for bound in (1.0, 0.02, 0.001):
    # The momentum buffer is the gradient at first; the update may be bound times the weights' norm.
    expected = learning_rate * min(gradients[0].norm(), bound * weights.norm()).item()
    long = length_of_first(bnb.optim.LARS32bit, max_unorm=bound)
    short = length_of_first(bnb.optim.LARS8bit, max_unorm=bound)
    is_sgd = torch.equal(train(bnb.optim.LARS8bit, 8, max_unorm=bound), sgd)
    print(f"max_unorm={bound}: first step of LARS32bit {long:.5f},", end=" ")
    print(f"expected {expected:.5f}, of LARS8bit {short:.5f};", end=" ")
    print(f"after 8 steps the weights of SGD8bit: {is_sgd}")
    is_as_described &= abs(long / expected - 1) < 0.01 and short == first and is_sgd
is_as_described &= first > 100 * length_of_first(bnb.optim.LARS32bit)
sys.exit(0 if is_as_described else "LARS8bit now bounds its steps")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
