#!/usr/bin/env bash
# minGRU-pytorch 0.2.1: a minLSTM that is given prev_hidden and several tokens goes on from another
# hidden state: it takes the logarithm of log_g's argument, prev_hidden + 0.5, in place of that of
# prev_hidden. So a sequence in chunks differs from the whole, while one token at a time agrees with
# it. minGRU of the same package agrees in any chunks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 minGRU-pytorch==0.2.1
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from minGRU_pytorch.minGRU import minGRU
from minGRU_pytorch.minLSTM import minLSTM

length = 12
torch.manual_seed(0)
x = torch.randn(2, length, 8, dtype=torch.float64)


def in_chunks(layer, size, shift=0.0):
    outputs, hidden = [], None
    for chunk in x.split(size, dim=1):
        if hidden is not None:
            hidden = hidden + shift
        output, hidden = layer(chunk, hidden, return_next_prev_hidden=True)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


is_as_described = True
print(f"largest difference from {length} tokens at once:")
for kind in (minGRU, minLSTM):
    torch.manual_seed(1)
    layer = kind(8).double()
    with torch.no_grad():
        whole = layer(x)
        differences = {}
        for size in (1, 2, 3, 6):
            differences[size] = (in_chunks(layer, size) - whole).abs().max().item()
        shifted = (in_chunks(layer, 3, shift=-0.5) - whole).abs().max().item()
    for size, difference in differences.items():
        print(f"    {kind.__name__:7} chunks of {size}: {difference:.1e}")
        is_wrong = kind is minLSTM and size > 1
        is_as_described &= difference > 0.1 if is_wrong else difference < 1e-9
    if kind is minLSTM:
        print(f"    {kind.__name__:7} chunks of 3, hidden less 0.5: {shifted:.1e}")
sys.exit(0 if is_as_described else "chunks of a minLSTM now agree with the whole")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
