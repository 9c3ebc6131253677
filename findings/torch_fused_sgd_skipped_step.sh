#!/usr/bin/env bash
# torch 2.13.0, CPU: SGD with fused=True and momentum, under a GradScaler, makes its momentum buffer
# of uninitialized memory in its first step. If that step is skipped for an inf, as the first ones
# of fp16 training often are, nothing is ever written there, and the next step adds what happens to
# be in memory to the gradient: parameters come out as any number, 1e37 too. No error, no warning;
# with fused=False, and if a later step is skipped, it is right. The program lets torch fill new
# memory with NaN, as its deterministic mode does, to show what is read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch

# From here on torch.empty() and the like give NaN, or the largest integer.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True


def train(is_fused, skipped):
    """Return the parameters after each of 4 steps of gradient 1, the one named skipped with inf."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=is_fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    after = []
    for step in range(4):
        optimizer.zero_grad()
        loss = parameter.sum() * (float("inf") if step == skipped else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after.append(parameter[0].item())
    return after


expected = {
    None: [-1, -2.5, -4.25, -6.125],
    0: [0, -1, -2.5, -4.25],
    1: [-1, -1, -2.5, -4.25],
}
is_as_described = True
for skipped in (None, 0, 1):
    print("no step is skipped" if skipped is None else f"step {skipped} has an inf")
    for is_fused in (False, True):
        after = train(is_fused, skipped)
        print(f"    fused={is_fused!s:5} the parameter after steps 0 to 3: {after}")
        if is_fused and skipped == 0:
            is_as_described &= after[0] == 0 and all(x != x for x in after[1:])
        else:
            is_as_described &= after == expected[skipped]
sys.exit(0 if is_as_described else "a skipped first step no longer leaves memory uninitialized")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
