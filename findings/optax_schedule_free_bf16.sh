#!/usr/bin/env bash
# optax 0.2.8: contrib.schedule_free averages iterates, and sums their weights for it. The sum has
# the smallest type of all parameters. In bf16 it stops growing after 256 steps: the average of all
# steps, which is to replace a decaying learning rate, becomes one of the last 256, and its noise no
# longer falls. One bf16 parameter is enough, also one that has no gradient: it takes the average
# from all fp32 ones. In fp16 a learning rate of 1e-4, squared, is 0, and then the average stays at
# the initial parameters. No error, no warning; state_dtype=float32 does not change it.
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


def average(other_dtype, learning_rate, steps, state_dtype=None):
    """Return averages of 2000 fp32 parameters after steps of noisy gradients towards 1."""
    params = {"weight": jnp.zeros(2000), "other": jnp.ones(2, other_dtype)}
    optimizer = contrib.schedule_free_sgd(learning_rate, state_dtype=state_dtype)

    def step(carry, key):
        params, state = carry
        weight = params["weight"]
        noise = 3 * jax.random.normal(key, weight.shape)
        gradients = {"weight": weight - 1 + noise, "other": jnp.zeros_like(params["other"])}
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(0), steps)
    (params, state), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
    averages = contrib.schedule_free_eval_params(state, params)["weight"]
    assert averages.dtype == jnp.float32
    return averages, state.weight_sum


def error(averages):
    return jnp.sqrt(jnp.mean((averages - 1) ** 2)).item()


is_as_described = True
errors = {}
print("2000 fp32 parameters beside two that have no gradient, of the type:")
for other_dtype, state_dtype in (
    (jnp.float32, None),
    (jnp.bfloat16, None),
    (jnp.bfloat16, jnp.float32),
):
    for steps in (200, 2000, 20000):
        averages, weight_sum = average(other_dtype, 0.05, steps, state_dtype)
        errors[other_dtype, state_dtype, steps] = error(averages)
        state_name = state_dtype and state_dtype.__name__
        print(f"    {other_dtype.__name__}, state_dtype={state_name}, {steps} steps:", end=" ")
        print(f"error of the fp32 ones {error(averages):.3f}, sum of weights {weight_sum}")
        if other_dtype == jnp.bfloat16 and steps > 200:
            is_as_described &= weight_sum.item() == 1.0
is_as_described &= errors[jnp.float32, None, 20000] < 0.5 * errors[jnp.float32, None, 2000]
for state_dtype in (None, jnp.float32):
    is_as_described &= errors[jnp.bfloat16, state_dtype, 200] < 0.4
    is_as_described &= errors[jnp.bfloat16, state_dtype, 20000] > 0.2

print("learning rate 1e-4, 2000 steps:")
for other_dtype in (jnp.float32, jnp.float16):
    averages, weight_sum = average(other_dtype, 1e-4, 2000)
    mean = averages.mean().item()
    print(f"    {other_dtype.__name__}: mean of the fp32 ones {mean:.4f}, began at 0,", end=" ")
    print(f"sum of weights {weight_sum:.2e}")
    is_as_described &= abs(mean) < 1e-3 if other_dtype == jnp.float16 else mean > 0.05
sys.exit(0 if is_as_described else "the sum of weights no longer has the smallest type")
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
