#!/usr/bin/env bash
# opacus 1.6.0: ExponentialNoise and StepNoise multiply the optimizer's present noise_multiplier,
# ExponentialGradClip and StepGradClip its max_grad_norm, which no state_dict has. PrivacyEngine's
# save_checkpoint and load_checkpoint take these schedulers, but after loading noise and norm are
# those of the start, and decay from there, while last_epoch goes on. PyTorch's ExponentialLR,
# resumed beside them, goes on exactly. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 opacus==1.6.0
cat > "$folder/program.py" <<'PROGRAM'
import io
import logging
import sys
import warnings

import torch
from opacus import PrivacyEngine
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.disable()
dataset = TensorDataset(torch.zeros(8, 2))
gamma = 0.5


class Training:
    """A model with a schedule for each of learning rate, noise and norm, all at 1 at first."""

    def __init__(self):
        self.engine = PrivacyEngine()
        model = torch.nn.Linear(2, 1)
        self.model, self.optimizer, _ = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(dataset, batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        self.rate = ExponentialLR(self.optimizer, gamma=gamma)
        self.noise = ExponentialNoise(self.optimizer, gamma=gamma)
        self.norm = ExponentialGradClip(self.optimizer, gamma=gamma)
        self.parts = {
            "module": self.model,
            "optimizer": self.optimizer,
            "noise_scheduler": self.noise,
            "grad_clip_scheduler": self.norm,
        }

    def values(self, epochs):
        """Return learning rate, noise multiplier and norm after each of some epochs."""
        values = []
        for _ in range(epochs):
            for scheduler in (self.rate, self.noise, self.norm):
                scheduler.step()
            rate = self.optimizer.param_groups[0]["lr"]
            noise, norm = self.optimizer.noise_multiplier, self.optimizer.max_grad_norm
            values.append((rate, noise, norm))
        return values


saved = Training()
before = saved.values(3)
file = io.BytesIO()
saved.engine.save_checkpoint(path=file, **saved.parts)
rate_state = saved.rate.state_dict()
expected = saved.values(2)
file.seek(0)
loaded = Training()
loaded.engine.load_checkpoint(path=file, **loaded.parts)
loaded.rate.load_state_dict(rate_state)
epoch = loaded.noise.last_epoch
got = loaded.values(2)
print("learning rate, noise multiplier and norm after epochs 1 to 3:", before)
print("after 4 and 5, without a stop:", expected)
print(f"after 4 and 5, loaded at epoch {epoch}:", got)
is_as_described = epoch == 3 and expected == [(0.0625,) * 3, (0.03125,) * 3]
is_as_described &= got == [(0.0625, 0.5, 0.5), (0.03125, 0.25, 0.25)]
sys.exit(0 if is_as_described else "schedules of noise and norm are now resumed")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
