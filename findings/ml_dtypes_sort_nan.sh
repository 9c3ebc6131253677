#!/usr/bin/env bash
# ml-dtypes 0.6.0 with numpy 2.3.5: np.sort of a bf16 or float8 array with NaNs takes them to be
# equal to every number. So it leaves the numbers out of order, as does np.argsort, where np.sort
# promises NaNs at the end and the rest in order. A median then is some number instead of NaN,
# np.unique gives values twice, and NaNs are among the smallest. No error, no warning; fp16 and fp32
# are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.3.5 ml-dtypes==0.6.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import ml_dtypes
import numpy as np

few = np.array([3, np.nan, 1, 2, 0], np.float32)
many = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
many[::100] = np.nan

is_as_described = True
for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    is_right = dtype in (np.float32, np.float16)
    print(f"{np.dtype(dtype).name}: np.sort({few.tolist()}) =", np.sort(few.astype(dtype)).tolist())
    values = many.astype(dtype)
    in_order = np.sort(values).astype(np.float32)
    numbers = in_order[~np.isnan(in_order)]
    wrong = int((numbers[1:] < numbers[:-1]).sum())
    repeated = len(np.unique(values)) - len(np.unique(values.astype(np.float32)))
    median = np.median(values)
    print(f"    1000 values, 10 of them NaN: sorted, {wrong} numbers are below the one before,")
    print(f"    NaN at the end: {np.isnan(in_order[-1])}, median {median},", end=" ")
    print(f"values that np.unique gives again: {repeated}")
    lowest = many[np.argsort(values)[:4]]
    print("    the 4 first by np.argsort:", *(f"{value:.2f}" for value in lowest))
    is_sorted = np.array_equal(np.sort(few.astype(dtype)).astype(np.float32)[:4], [0, 1, 2, 3])
    is_as_described &= is_sorted == is_right and (wrong == 0) == is_right
    is_as_described &= bool(np.isnan(in_order[-1])) == bool(np.isnan(median)) == is_right
    is_as_described &= (repeated == 0) == is_right and bool(np.isnan(lowest).any()) != is_right
sys.exit(0 if is_as_described else "NaNs of ml_dtypes are no longer left where they are")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
