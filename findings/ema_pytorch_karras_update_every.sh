#!/usr/bin/env bash
# ema-pytorch 0.8.3: KarrasEMA and PostHocEMA average with weights t^gamma, for a width sigma_rel
# that is asked for. With update_every=N, to save compute, the decay of an update is still that of
# one step, not of N. So the exponent shrinks to (gamma + 1) / N - 1: with N=10, as in the README,
# sigma_rel=0.05 is an average with its middle at 64% of training instead of 95%, and with N=100,
# the default, at 15%, close to the untrained model. synthesize_ema_model is wrong as well. No
# error, no warning; with update_every=1 all is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 ema-pytorch==0.8.3
cat > "$folder/program.py" <<'PROGRAM'
import sys
import tempfile

import torch
from ema_pytorch import KarrasEMA, PostHocEMA

STEPS = 10000


class Time(torch.nn.Module):
    """A model whose parameters are the part of training that is done, and its square."""

    def __init__(self):
        super().__init__()
        self.time = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))


def train(average, model):
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            model.time.copy_(torch.tensor([step / STEPS, (step / STEPS) ** 2]))
        average.update()


def mean_and_width(average):
    mean, mean_of_squares = average.ema_model.time.tolist()
    return mean, (mean_of_squares - mean**2) ** 0.5


is_as_described = True
for update_every in (1, 10, 100):
    rows = []
    for sigma_rel in (0.05, 0.25):
        model = Time()
        average = KarrasEMA(model, sigma_rel=sigma_rel, update_every=update_every)
        train(average, model)
        rows.append(("KarrasEMA", sigma_rel, average))
    with tempfile.TemporaryDirectory() as checkpoints:
        model = Time()
        averages = PostHocEMA(
            model, sigma_rels=(0.05, 0.28), update_every=update_every,
            checkpoint_every_num_steps=1000, checkpoint_folder=checkpoints,
            checkpoint_dtype=torch.float64,
        )
        train(averages, model)
        rows.append(("synthesized", 0.15, averages.synthesize_ema_model(sigma_rel=0.15)))
    print(f"{update_every=}")
    for name, sigma_rel, average in rows:
        expected = (average.gamma + 1) / (average.gamma + 2)  # the mean of t with weights t^gamma
        mean, width = mean_and_width(average)
        print(f"    {name:11} {sigma_rel=}: mean at {mean:.4f} of training, to be", end=" ")
        print(f"{expected:.4f}; width {width:.4f}, to be {sigma_rel}")
        if update_every == 1:
            is_as_described &= abs(mean - expected) < 0.002 and abs(width - sigma_rel) < 0.002
        else:
            exponent = (average.gamma + 1) / update_every
            is_as_described &= mean < expected - 0.25
            if name == "KarrasEMA":
                is_as_described &= abs(mean - exponent / (exponent + 1)) < 0.01
sys.exit(0 if is_as_described else "update_every no longer changes what is averaged")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
