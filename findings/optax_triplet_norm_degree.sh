#!/usr/bin/env bash
# optax 0.2.8: losses.triplet_margin_loss takes powers of differences, not of their absolute values.
# With norm_degree=1, which should be the Manhattan distance, differences of opposite sign cancel:
# the anchor falls out of the loss and never gets a gradient, and those of the positive and of the
# negative are the same wherever they are. With norm_degree=3 the loss is nan where a sum of cubes
# is negative. Only even degrees are right, as the default 2 is. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.3.5 optax==0.2.8
cat > "$folder/program.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

print("jax", jax.__version__, "optax", optax.__version__)
anchors = jnp.zeros((4, 2))
positives = jnp.array([[2.0, -2.0], [1.0, 1.0], [-1.0, -1.0], [-1.0, 0.5]])
negatives = jnp.array([[0.5, 0.5], [2.0, -2.0], [2.0, 0.1], [2.0, 1.0]])


def loss(anchors, degree):
    return optax.losses.triplet_margin_loss(
        anchors, positives, negatives, norm_degree=degree, margin=1.0
    )


def expected_loss(degree):
    to_positive = np.linalg.norm(anchors - positives, ord=degree, axis=-1)
    to_negative = np.linalg.norm(anchors - negatives, ord=degree, axis=-1)
    return np.maximum(to_positive - to_negative + 1.0, 0)


is_as_described = True
for degree in (1, 2, 3, 4):
    losses = np.asarray(loss(anchors, degree))
    expected = expected_loss(degree)
    print(f"norm_degree={degree}: {losses.round(3)}, expected {expected.round(3)}")
    is_right = np.isclose(losses, expected, atol=1e-2)
    is_as_described &= is_right.all().item() if degree % 2 == 0 else not is_right.all().item()
    if degree == 3:
        is_as_described &= np.isnan(losses).any().item()

print("norm_degree=1, one dimension, anchor 0, negative 1: gradients of the three by the positive")
for positive in (3.0, -3.0):
    points = [jnp.array([[value]]) for value in (0.0, positive, 1.0)]
    gradients = jax.grad(
        lambda points: optax.losses.triplet_margin_loss(*points, norm_degree=1, margin=10.0).sum()
    )(points)
    gradients = [gradient.item() for gradient in gradients]
    expected = [-1.0 - np.sign(positive).item() + 1.0 + 1.0, np.sign(positive).item(), -1.0]
    print(f"    positive {positive}: {gradients}, expected {expected}")
    is_as_described &= gradients == [0.0, -1.0, 1.0]
sys.exit(0 if is_as_described else "odd degrees now behave in another way")
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
