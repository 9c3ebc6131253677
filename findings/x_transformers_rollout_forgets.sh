#!/usr/bin/env bash
# x-transformers 2.31.10: with rollout_steps above 1, ContinuousAutoregressiveWrapper predicts the
# first step from the sequence so far, and each later one from the last prediction alone: it passes
# neither the sequence nor the cache that it has just been given. So the loss of a rollout is not
# that of generating these steps, and an early element of the sequence has no part in later ones but
# by that one prediction. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 x-transformers==2.31.10
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F
from x_transformers import ContinuousAutoregressiveWrapper, ContinuousTransformerWrapper, Decoder

steps, length, size = 3, 12, 4
torch.manual_seed(0)
network = ContinuousTransformerWrapper(
    dim_in=size,
    dim_out=size,
    use_abs_pos_emb=False,
    attn_layers=Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, rotary_pos_emb=True),
)
wrapper = ContinuousAutoregressiveWrapper(network).double().eval()
x = torch.randn(1, length, size, dtype=torch.float64)

seen = []
network.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))


def predictions_after(history, is_remembered):
    """Predict steps one by one, from all before them or from the last one alone."""
    predictions = []
    for _ in range(steps):
        predictions.append(network(history)[:, -1:])
        history = torch.cat((history, predictions[-1]), dim=1) if is_remembered else predictions[-1]
    return torch.cat(predictions, dim=1)


is_as_described = True
with torch.no_grad():
    for seed in (1, 2, 4):
        torch.manual_seed(seed)
        seen.clear()
        loss = wrapper(x, rollout_steps=steps).item()
        lengths = [shown.shape[1] for shown in seen]
        history = seen[0]
        taken = history.shape[1]
        targets = x[:, taken : taken + steps]
        is_as_described &= torch.equal(history, x[:, :taken]) and taken > 1
        remembered = F.mse_loss(predictions_after(history, True), targets).item()
        forgotten = F.mse_loss(predictions_after(history, False), targets).item()
        generated = F.mse_loss(wrapper.generate(history, steps), targets).item()
        print(f"{steps} steps after {taken}: the network was shown {lengths} elements;", end=" ")
        print(f"loss {loss:.6f}, of the last alone {forgotten:.6f},", end=" ")
        print(f"of all before {remembered:.6f}, of generate() {generated:.6f}")
        is_as_described &= lengths == [taken] + [1] * (steps - 1)
        is_as_described &= abs(loss - forgotten) < 1e-9 and abs(generated - remembered) < 1e-9
        is_as_described &= abs(loss - remembered) > 1e-4
sys.exit(0 if is_as_described else "a rollout now goes on from all before")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
