#!/usr/bin/env bash
# optimum-quanto 0.2.7: Calibration documents momentum as that of the scales of quantized modules'
# inputs and outputs, but uses 0.9 for the inputs, whatever it is given. With momentum=0, which is
# to take the last batch's scale, the input's is still the slow average, and what is beyond it is
# clipped. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 optimum-quanto==0.2.7
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch

warnings.filterwarnings("ignore")
from optimum.quanto import Calibration, qint8, quantize  # noqa: E402

BATCHES = (2.0, 20.0, 20.0)


def scales(momentum):
    """Return the largest input and output that the scales of an identity stand for."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    torch.nn.init.eye_(model[0].weight)
    quantize(model, weights=qint8, activations=qint8)
    with Calibration(momentum=momentum), torch.no_grad():
        for largest in BATCHES:
            model(torch.full((2, 4), largest))
    return 127 * model[0].input_scale.item(), 127 * model[0].output_scale.item()


def averaged(momentum):
    average = BATCHES[0]
    for largest in BATCHES[1:]:
        average = momentum * average + (1 - momentum) * largest
    return average


print(f"an identity, calibrated by batches of {', '.join(str(value) for value in BATCHES)}")
is_as_described = True
outputs = []
for momentum in (0.0, 0.5, 0.9):
    of_input, of_output = scales(momentum)
    outputs.append(of_output)
    print(f"momentum={momentum}: the input's scale is for {of_input:.2f}, by the momentum", end=" ")
    print(f"{averaged(momentum):.2f}; the output's is for {of_output:.2f}")
    is_as_described &= abs(of_input - averaged(0.9)) < 0.01
is_as_described &= outputs[0] - outputs[-1] > 1
sys.exit(0 if is_as_described else "the inputs' scales follow the momentum")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
