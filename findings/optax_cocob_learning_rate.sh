#!/usr/bin/env bash
# optax 0.2.8: contrib.cocob takes a learning_rate ("optional learning rate to e.g. inject some
# scheduler"), but multiplies gradients by it, and COCOB does not depend on their scale. A constant
# learning rate is ignored: 1.0 and 1e-4 take the same steps. Its siblings that choose their steps
# as well, contrib.dog, dowg and prodigy, multiply updates by it. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.3.5 optax==0.2.8
cat > "$folder/program.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
import optax
from optax import contrib

print("jax", jax.__version__, "optax", optax.__version__)
target = jnp.array([1.0, 2.0, 3.0])


def distance(params):
    return jnp.sum((params - target) ** 2)


def train(optimizer, steps):
    """Return the length of the way from 0 to the parameters after some steps."""
    params = jnp.zeros_like(target)
    state = optimizer.init(params)
    for _ in range(steps):
        gradients = jax.grad(distance)(params)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return jnp.linalg.norm(params).item()


is_as_described = True
print("distance from 0 after 20 steps:")
for make in (contrib.cocob, contrib.dog, contrib.dowg, contrib.prodigy):
    lengths = [train(make(learning_rate), 20) for learning_rate in (1.0, 1e-2, 1e-4)]
    print(f"    {make.__name__}, learning_rate 1, 1e-2 and 1e-4:", end=" ")
    print(", ".join(f"{length:.3g}" for length in lengths))
    if make is contrib.cocob:
        is_as_described &= max(lengths) - min(lengths) < 1e-3 and min(lengths) > 0.5
    else:
        is_as_described &= lengths[0] > 5 * lengths[1] > 25 * lengths[2]
sys.exit(0 if is_as_described else "cocob now follows its learning rate")
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
