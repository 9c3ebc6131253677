#!/usr/bin/env bash
# safetensors 0.8.0: save and save_file of safetensors.numpy write the memory of an array as it is,
# and its shape. They ask for contiguous and dense arrays, but an array in Fortran order, as a
# transposed weight and much of what scipy and scikit-learn return, is that too, and is read back as
# an array of the same shape with its elements mixed up. No error, no warning; 0.7.0 is right, and
# safetensors.torch refuses a transposed tensor. (The authors know it.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/program.py" <<'PROGRAM'
import os
import sys
import tempfile

import numpy as np
import safetensors
from safetensors.numpy import load, load_file, save, save_file

weight = np.arange(6, dtype=np.float32).reshape(2, 3)
wrong = []
print(f"safetensors {safetensors.__version__}")
for name, array in (
    ("in C order", weight),
    ("transposed", weight.T),
    ("in Fortran order", np.asfortranarray(weight)),
):
    with tempfile.TemporaryDirectory() as root:
        path = os.path.join(root, "weight.safetensors")
        save_file({"weight": array}, path)
        read = load_file(path)["weight"]
    same = np.array_equal(read, array)
    assert same == np.array_equal(load(save({"weight": array}))["weight"], array)
    print(f"    {name}: {array.tolist()} is read back as {read.tolist()}")
    wrong.append(not same)
expected = [False, True, True] if safetensors.__version__ == "0.8.0" else [False, False, False]
sys.exit(0 if wrong == expected else "arrays in Fortran order are read back otherwise")
PROGRAM
for version in 0.7.0 0.8.0; do
    python3 -m venv "$folder/venv-$version"
    "$folder/venv-$version/bin/pip" install --quiet numpy==2.3.5 "safetensors==$version"
    "$folder/venv-$version/bin/python" "$folder/program.py"
done
