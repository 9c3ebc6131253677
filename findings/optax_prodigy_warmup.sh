#!/usr/bin/env bash
# optax 0.2.8: contrib.prodigy, whose documentation recommends a schedule with a warmup, makes all
# parameters nan if the warmup begins at 0, as in optax.warmup_cosine_decay_schedule(0.0, ...): the
# first step has weighed no gradient yet, and its estimate of the distance is 0 / 0, which
# maximum() keeps for ever. contrib.dadapt_adamw does the same, a step later. A warmup that begins
# at 1e-3, prodigy's safeguard_warmup=True, and adamw with the warmup from 0 all train.
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
target = jnp.array([[1.0, 2.0], [3.0, 4.0]])


def distance(params):
    return jnp.sum((params - target) ** 2)


def train(optimizer, steps):
    params = jnp.zeros_like(target)
    state = optimizer.init(params)
    distances = [distance(params).item()]
    for _ in range(steps):
        gradients = jax.grad(distance)(params)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        distances.append(distance(params).item())
    return distances


is_as_described = True
for name, make, first_nan in (
    ("prodigy", contrib.prodigy, 1),
    ("dadapt_adamw", contrib.dadapt_adamw, 2),
    (
        "prodigy, safeguard_warmup=True",
        lambda rate: contrib.prodigy(rate, safeguard_warmup=True),
        None,
    ),
    ("adamw", optax.adamw, None),
):
    for begin in (1e-3, 0.0):
        schedule = optax.warmup_cosine_decay_schedule(begin, 1.0, 10, 200)
        distances = train(make(schedule), 200)
        finite = [jnp.isfinite(value).item() for value in distances]
        print(f"{name}, warmup from {begin}: distance {distances[0]}, at last {distances[-1]:.2g}")
        if begin == 0.0 and first_nan is not None:
            print(f"    finite after 0, 1, 2 and 3 steps: {finite[:4]}")
            is_as_described &= all(finite[:first_nan]) and not any(finite[first_nan:])
        else:
            is_as_described &= all(finite) and distances[-1] < 0.5 * distances[0]
sys.exit(0 if is_as_described else "a warmup from 0 now behaves in another way")
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
