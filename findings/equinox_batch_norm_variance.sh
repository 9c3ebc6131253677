#!/usr/bin/env bash
# equinox 0.13.8: nn.BatchNorm(mode="batch"), the mode recommended for new code, takes a far too
# large variance in inference until it has seen several hundred batches. The running variance
# starts at 1 but is corrected as an average that starts at 0 is: dividing by 1 - momentum^t adds
# momentum^t / (1 - momentum^t) to it, which is 99 after one batch and 0.58 after a hundred with the
# default momentum of 0.99. Outputs are too small even if all batches are the same. The running
# mean starts at 0 and is right, and mode="ema" has the right variance from the first batch on.
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

MOMENTUM = 0.99


def apply(layer, state, batch, inference):
    def of_one(sample, state):
        return layer(sample, state, inference=inference)

    return jax.vmap(of_one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch, state)


print("jax", jax.__version__, "equinox", equinox.__version__)
# One batch, again and again: its own mean and variance are the right running ones.
batch = 2.0 + 0.5 * jax.random.normal(jax.random.key(0), (512, 4))
values = np.asarray(batch, np.float64)
variance = values.var(axis=0)
is_as_described = True
for mode in ("ema", "batch"):
    layer, state = equinox.nn.make_with_state(equinox.nn.BatchNorm)(
        4, axis_name="batch", momentum=MOMENTUM, mode=mode
    )
    for step in range(1, 301):
        _, state = apply(layer, state, batch, inference=False)
        if step not in (1, 10, 100, 300):
            continue
        output, _ = apply(layer, state, batch, inference=True)
        output = np.asarray(output, np.float64)
        added = 0.0
        if mode == "batch":
            added = MOMENTUM**step / (1 - MOMENTUM**step)
        taken = variance / output.var(axis=0) - layer.eps
        print(f"{mode}, {step} batches: outputs have mean {np.abs(output.mean()):.1g}", end=" ")
        print(f"and std {output.std():.3f}; variance", variance.round(3), "taken", taken.round(3))
        is_as_described &= np.allclose(taken, variance + added, rtol=1e-2)
        is_as_described &= bool(np.abs(output.mean(axis=0)).max() < 1e-3)
sys.exit(0 if is_as_described else "inference now takes another variance")
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
