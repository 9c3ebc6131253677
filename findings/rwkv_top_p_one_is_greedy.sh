#!/usr/bin/env bash
# rwkv 0.8.32: sample_logits with top_p=1, which shall leave out no token, always takes the most
# likely token for about every second set of logits. The float32 sum of the sorted probabilities
# then ends a rounding error below 1, no entry is >= top_p, and argmax of all False is 0: the cutoff
# becomes the largest probability. So generation with top_p=1 turns greedy at random positions,
# whatever the temperature. With top_p=0.999 it samples. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 rwkv==0.8.32
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import numpy as np
import torch
from rwkv.utils import PIPELINE

print("torch", torch.__version__, "numpy", np.__version__, "rwkv", version("rwkv"))
pipeline = PIPELINE(None, "rwkv_vocab_v20230424")  # sampling needs no model
sets, draws = 60, 20

is_as_described = True
for vocab_size in (1000, 65536):
    for top_p in (1.0, 0.999):
        np.random.seed(0)
        greedy_below_one = greedy_otherwise = below_one = 0
        for seed in range(sets):
            logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))
            tokens = {pipeline.sample_logits(logits.clone(), top_p=top_p) for _ in range(draws)}
            is_greedy = tokens == {int(logits.argmax())}
            ordered = np.sort(logits.softmax(-1).numpy())[::-1]
            sums_below_one = np.cumsum(ordered)[-1] < 1
            below_one += int(sums_below_one)
            greedy_below_one += int(is_greedy and sums_below_one)
            greedy_otherwise += int(is_greedy and not sums_below_one)
        greedy = greedy_below_one + greedy_otherwise
        print(f"{vocab_size:6} tokens, top_p {top_p}: {greedy} of {sets} sets of logits gave")
        print(f"    the most likely token in all of {draws} draws; {below_one} sets sum below 1")
        if top_p == 1.0:
            is_as_described &= 0.2 * sets < greedy < 0.8 * sets
            is_as_described &= greedy_below_one == below_one and greedy_otherwise == 0
        else:
            is_as_described &= greedy == 0
largest = torch.randn(1000, generator=torch.Generator().manual_seed(0)).softmax(-1).max()
print(f"the most likely of 1000 tokens has a probability of about {largest:.3f}")
sys.exit(0 if is_as_described else "top_p=1 now samples")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
