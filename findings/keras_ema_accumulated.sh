#!/usr/bin/env bash
# keras 3.15.1: an optimizer with use_ema=True and gradient_accumulation_steps=n changes parameters
# at every n-th step, but their moving average at every step: ema_momentum acts as its n-th power.
# With 0.9 and n=4 the average remembers three updates, not ten. With ema_overwrite_frequency, which
# its documentation counts in accumulated steps, parameters are overwritten n times, first before
# the update that should come first. Accumulation of equal gradients should change nothing but the
# number of steps. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 jaxlib==0.10.2 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import jax
import keras
import numpy as np

print("keras", keras.__version__, "jax", jax.__version__, "backend", keras.backend.backend())
momentum, updates = 0.9, 6


def train(accumulation, frequency=None, updates=updates):
    """Return a parameter after each step, and its average, for gradients of -1."""
    parameter = keras.Variable(np.zeros(1, np.float32))
    optimizer = keras.optimizers.SGD(
        1.0,
        use_ema=True,
        ema_momentum=momentum,
        ema_overwrite_frequency=frequency,
        gradient_accumulation_steps=accumulation,
    )
    optimizer.build([parameter])
    gradient = keras.ops.convert_to_tensor(np.full(1, -1.0, np.float32))
    values = []
    for _ in range(updates * (accumulation or 1)):
        optimizer.apply([gradient], [parameter])
        values.append(parameter.numpy().item())
    optimizer.finalize_variable_values([parameter])
    return values, parameter.numpy().item()


is_as_described = True
expected = 1.0  # the average begins with the first update
for value in range(2, updates + 1):
    expected = momentum * expected + (1 - momentum) * value
for accumulation in (None, 2, 4):
    values, average = train(accumulation)
    print(f"accumulation {accumulation}: parameter at last {values[-1]},", end=" ")
    print(f"its average {average:.3f}, expected {expected:.3f}")
    is_as_described &= values[-1] == updates
    if accumulation is None:
        is_as_described &= abs(average - expected) < 1e-4
    else:
        is_as_described &= average > expected + 0.5

print("ema_overwrite_frequency=3, the parameter around the third update:")
values, _ = train(None, frequency=3, updates=3)
print("    without accumulation:", [round(value, 3) for value in values[1:3]])
is_as_described &= values[1] == 2.0 and abs(values[2] - 1.29) < 1e-3
values, _ = train(4, frequency=3, updates=3)
print("    accumulation of 4:   ", [round(value, 3) for value in values[7:12]])
is_as_described &= values[7] == 2.0 and values[8] < 1.5
sys.exit(0 if is_as_described else "the moving average now follows updates, not steps")
PROGRAM
KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
