#!/usr/bin/env bash
# orbax-checkpoint 0.12.8: a tree that holds {"encoder": {"kernel": x}} beside
# {"encoder.kernel": y}, as when names of a PyTorch state dict stand next to a nested tree, is saved
# without an error, but restored with the same array at both places: arrays are stored by their path
# joined with dots, and one overwrites the other. A list's first item, {"layers": [x]}, and
# "layers.0" do the same, and a target tree for the restore does not help. Names with slashes,
# "encoder/kernel", are kept apart.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.3.5 \
    orbax-checkpoint==0.12.8
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import tempfile
from importlib.metadata import version

logging.disable()
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint  # noqa: E402

print("jax", jax.__version__, "orbax-checkpoint", version("orbax-checkpoint"))
ones = jnp.ones(3)
twos = jnp.full(3, 2.0)
trees = {
    "dot": {"encoder": {"kernel": ones}, "encoder.kernel": twos},
    "list": {"layers": [ones], "layers.0": twos},
    "slash": {"encoder": {"kernel": ones}, "encoder/kernel": twos},
}
is_as_described = True
with tempfile.TemporaryDirectory() as root:
    for name, tree in trees.items():
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(f"{root}/{name}", tree)
            checkpointer.wait_until_finished()
            for target in (None, jax.tree.map(jnp.zeros_like, tree)):
                restored = checkpointer.restore(f"{root}/{name}", target)
                given = "with" if target else "without"
                print(f"saved    {jax.tree.map(lambda array: array.tolist(), tree)}")
                print(f"restored {jax.tree.map(lambda array: array.tolist(), restored)}", end=" ")
                print(f"{given} a target")
                # Which of the two arrays is written last is left open.
                first, second = map(np.asarray, jax.tree.leaves(restored))
                if name == "slash":
                    is_as_described &= bool((first == 1.0).all() and (second == 2.0).all())
                else:
                    is_as_described &= bool((first == second).all())
sys.exit(0 if is_as_described else "names with dots are now stored in another way")
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
