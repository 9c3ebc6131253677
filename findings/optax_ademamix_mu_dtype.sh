#!/usr/bin/env bash
# optax 0.2.8: contrib.ademamix(mu_dtype=bfloat16) begins with states of bf16, but the first update
# turns them into the type of the gradients: two momenta and the second moment of every parameter
# are fp32 from then on, and the memory that mu_dtype is to save is not saved. The state changes its
# type, so that a jitted step compiles twice, and jax.lax.scan refuses it. All other optimizers with
# mu_dtype (adam, adamw, nadam, amsgrad, lion, contrib.adopt, contrib.muon) keep it.
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
params = {"weight": jnp.ones((64, 64))}
gradients = {"weight": jnp.full((64, 64), 0.5, jnp.float32)}


def describe(state):
    """Return the bytes of a state, and the types of its matrices."""
    leaves = jax.tree.leaves(state)
    types = [leaf.dtype.name for leaf in leaves if leaf.ndim == 2]
    return sum(leaf.nbytes for leaf in leaves), types


def train(optimizer):
    """Return what a state is before and after three steps, and how often a step compiled."""
    compilations = []

    @jax.jit
    def step(state):
        compilations.append(None)
        return optimizer.update(gradients, state, params)[1]

    state = optimizer.init(params)
    before = describe(state)
    for _ in range(3):
        state = step(state)
    return before, describe(state), len(compilations)


is_as_described = True
for name in (
    "adam",
    "adamw",
    "nadam",
    "amsgrad",
    "lion",
    "contrib.adopt",
    "contrib.muon",
    "contrib.ademamix",
):
    make = getattr(contrib, name.removeprefix("contrib."), None) or getattr(optax, name)
    before, after, compilations = train(make(1e-3, mu_dtype=jnp.bfloat16))
    print(f"{name}: {before[0]} bytes, {before[1]}")
    print(f"    after three steps: {after[0]} bytes, {after[1]}, compiled {compilations} times")
    if name == "contrib.ademamix":
        is_as_described &= before[1] == 3 * ["bfloat16"] and after[1] == 3 * ["float32"]
        is_as_described &= compilations == 2
    else:
        is_as_described &= before == after and compilations == 1
sys.exit(0 if is_as_described else "ademamix now keeps mu_dtype")
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
