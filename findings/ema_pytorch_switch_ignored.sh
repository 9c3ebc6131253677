#!/usr/bin/env bash
# ema-pytorch 0.8.3: EMA leaves parameters of ignore_names (and ignore_startswith_names) alone, but
# copies them with all others while step <= update_after_step. With update_model_with_ema_every=N,
# or by update_model_with_ema(), the averages are copied back into the model ("switch EMA"), and
# with them the ignored ones: as they were near step 100. So an ignored layer loses all it has
# learned since, every N steps. No error, no warning; with update_model_with_ema_beta above 0 the
# ignored ones are left alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 ema-pytorch==0.8.3
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from ema_pytorch import EMA


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.averaged = torch.nn.Parameter(torch.zeros(1))
        self.ignored = torch.nn.Parameter(torch.zeros(1))


def train(**options):
    """Return the ignored parameter, to which each of 1001 steps adds 1, and where it fell."""
    model = Model()
    average = EMA(model, ignore_names={"ignored"}, **options)
    falls = []
    for step in range(1001):
        with torch.no_grad():
            model.averaged += 1
            model.ignored += 1
        before = model.ignored.item()
        average.update()
        if model.ignored.item() != before:
            falls.append((step, before, model.ignored.item()))
    return model.ignored.item(), falls


is_as_described = True
for options in (
    {},
    {"update_model_with_ema_every": 500, "update_model_with_ema_beta": 0.01},
    {"update_model_with_ema_every": 500},
):
    last, falls = train(**options)
    print(f"{options or 'without copies into the model'}: after 1001 steps of +1 it is {last}")
    for step, before, after in falls:
        print(f"    in step {step} it went from {before} to {after}")
    if options == {"update_model_with_ema_every": 500}:
        is_as_described &= [fall[0] for fall in falls] == [500, 1000] and last == 101
    else:
        is_as_described &= last == 1001 and not falls
sys.exit(0 if is_as_described else "copies into the model no longer reset ignored parameters")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
