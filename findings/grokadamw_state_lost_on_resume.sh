#!/usr/bin/env bash
# grokadamw 0.1.2 (also optim="grokadamw" of transformers' Trainer): GrokAdamW keeps its averages,
# the slow gradients and the number of steps in its parameter groups, by tensor. state_dict() saves
# them with the tensors of the process as keys, its "state" is empty, and after load_state_dict(),
# which copies the groups, no parameter is found: a resumed run begins anew, with all averages 0 and
# the corrections of the first step. No error, no warning, though state_dict() and load_state_dict()
# are its own. torch's AdamW resumes exactly.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 grokadamw==0.1.2
cat > "$folder/program.py" <<'PROGRAM'
import io
import sys
import warnings

import torch

warnings.filterwarnings("ignore")
from grokadamw import GrokAdamW  # noqa: E402

STEPS, STOP = 40, 20
torch.manual_seed(0)
inputs = torch.randn(STEPS, 32, 8)
targets = torch.randn(STEPS, 32, 4)


def make(kind):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    return model, kind(model.parameters(), lr=1e-3)


def train(model, optimizer, steps):
    """Return the norm of each step, over all parameters."""
    norms = []
    for step in steps:
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[step]), targets[step]).backward()
        optimizer.step()
        after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        norms.append((after - before).norm().item())
    return norms


def resumed(kind):
    """Train, save to a file and load it midway, and return the norms, and the saved state."""
    model, optimizer = make(kind)
    norms = train(model, optimizer, range(STOP))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    model, optimizer = make(kind)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    norms += train(model, optimizer, range(STOP, STEPS))
    return model, norms, saved["optimizer"]["state"]


is_as_described = True
for kind in (torch.optim.AdamW, GrokAdamW):
    model, optimizer = make(kind)
    norms = train(model, optimizer, range(STEPS))
    model_resumed, norms_resumed, state = resumed(kind)
    vectors = [
        torch.nn.utils.parameters_to_vector(m.parameters()) for m in (model, model_resumed)
    ]
    apart = (vectors[0] - vectors[1]).norm().item()
    jump = norms_resumed[STOP] / norms[STOP]
    print(f"{kind.__name__}: saved state of {len(state)} parameters; resumed, the next step is")
    print(f"    {jump:.3f} times as long, and after {STEPS - STOP} steps weights are", end=" ")
    print(f"{apart:.6f} apart, those of {STEPS} steps being {sum(norms):.3f} long together")
    if kind is GrokAdamW:
        is_as_described &= len(state) == 0 and jump > 1.2 and apart > 0.01
    else:
        is_as_described &= len(state) == 4 and apart == 0
sys.exit(0 if is_as_described else "GrokAdamW now resumes its state")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
