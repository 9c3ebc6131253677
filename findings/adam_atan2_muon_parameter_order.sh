#!/usr/bin/env bash
# adam-atan2-pytorch 0.4.1: MuonAdamAtan2 takes the parameters of Muon out of all parameters by a
# difference of Python sets, whose order follows addresses in memory. So the order of parameters is
# another in each process, also of the same program, while a state_dict names them by number: after
# resuming in a new process moments belong to other parameters, silently where shapes agree. With
# remove_muon_params_from_params=False, and with torch.optim.AdamW, a resumed run is exact.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 adam-atan2-pytorch==0.4.1
cat > "$folder/program.py" <<'PROGRAM'
import sys
from pathlib import Path

import torch
from adam_atan2_pytorch import MuonAdamAtan2

how, when, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
torch.manual_seed(0)
width, layers = 8, 12
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)]).double()
inputs = torch.randn(32, width).double()
targets = torch.randn(32, width).double()
weights = [layer.weight for layer in model]
biases = [layer.bias for layer in model]


def make_optimizer():
    if how == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    if how == "MuonAdamAtan2":
        return MuonAdamAtan2(muon_params=weights, params=model.parameters(), lr=1e-2)
    apart = {"params": biases, "remove_muon_params_from_params": False}
    return MuonAdamAtan2(muon_params=weights, lr=1e-2, **apart)


optimizer = make_optimizer()
names = {parameter: name for name, parameter in model.named_parameters()}
order = [names[parameter] for parameter in optimizer.param_groups[0]["params"]]


def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


if when == "first":
    train(10)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "order": order}, folder / "checkpoint.pt")
    torch.save(train(10), folder / "expected.pt")
else:
    checkpoint = torch.load(folder / "checkpoint.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    expected = torch.load(folder / "expected.pt")
    difference = (train(10) - expected).abs().max().item()
    same_order = order == checkpoint["order"]
    print(f"{how}: parameters in the same order: {same_order},", end=" ")
    print(f"weights 10 steps after resuming differ by {difference:.1e}")
    if how == "MuonAdamAtan2":
        print("    first process: ", *checkpoint["order"][:8])
        print("    second process:", *order[:8])
        is_as_described = not same_order and difference > 1e-4
    else:
        is_as_described = same_order and difference == 0
    sys.exit(0 if is_as_described else f"{how} is now resumed otherwise")
PROGRAM
for how in AdamW "MuonAdamAtan2 with apart" MuonAdamAtan2; do
    for when in first then; do
        "$folder/venv/bin/python" "$folder/program.py" "$how" "$when" "$folder"
    done
done
