#!/usr/bin/env bash
# equinox 0.13.8: nn.RotaryPositionalEmbedding(..., theta=500000) rotates by the theta of whichever
# module of the same size and dtype was called first in the process, for all do share one cache of
# cosines and sines whose key leaves theta out. A longer sequence makes the cache anew with the
# theta of its caller, which then changes what the other module returns. No error, no warning. So a
# model with local and global theta, or two models in one process, have one theta; the first module
# called in a fresh process rotates as the formula says.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.3.5 equinox==0.13.8
cat > "$folder/program.py" <<'PROGRAM'
import sys

import equinox
import jax
import numpy as np

SIZE = 8
THETAS = (10_000.0, 500_000.0)


def rotate(x, theta):
    """Rotate pairs (i, i + SIZE / 2) of each position's vector, in fp64."""
    positions = np.arange(len(x))[:, None]
    angles = positions * theta ** (-np.arange(0, SIZE, 2) / SIZE)
    first, second = np.split(np.asarray(x, np.float64), 2, axis=1)
    rotated_first = first * np.cos(angles) - second * np.sin(angles)
    rotated_second = second * np.cos(angles) + first * np.sin(angles)
    return np.concatenate([rotated_first, rotated_second], axis=1)


print("jax", jax.__version__, "equinox", equinox.__version__)
x = jax.random.normal(jax.random.key(0), (64, SIZE))
modules = {theta: equinox.nn.RotaryPositionalEmbedding(SIZE, theta=theta) for theta in THETAS}
is_as_described = True
# Of each call: the module's theta, the length of the sequence, and the theta that it rotates by.
for theta, length, used in (
    (10_000.0, 32, 10_000.0),
    (500_000.0, 32, 10_000.0),
    (500_000.0, 64, 500_000.0),
    (10_000.0, 32, 500_000.0),
):
    output = np.asarray(modules[theta](x[:length]))
    errors = {other: np.abs(output - rotate(x[:length], other)).max() for other in THETAS}
    print(f"theta={theta:.0f}, {length} positions:", end=" ")
    print(", ".join(f"{error:.1g} from theta {other:.0f}" for other, error in errors.items()))
    is_as_described &= all((error < 1e-4) == (other == used) for other, error in errors.items())
sys.exit(0 if is_as_described else "each module now rotates by another theta")
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
