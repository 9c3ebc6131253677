#!/usr/bin/env bash
# opacus 1.6.0: with clipping="adaptive" the optimizer learns the norm that it clips gradients to
# and makes noise for, but neither its state_dict nor PrivacyEngine.save_checkpoint has it. After
# load_checkpoint it clips to the max_grad_norm that it was made with, until it has learnt another:
# with one too large noise is as much larger again. No error, no warning.
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
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.disable()
torch.manual_seed(0)
inputs = torch.randn(256, 8)
targets = inputs @ torch.randn(8, 1) + 0.1 * torch.randn(256, 1)
dataset = TensorDataset(inputs, targets)


def make():
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=DataLoader(dataset, batch_size=32),
        noise_multiplier=0.1,
        max_grad_norm=1000.0,
        poisson_sampling=False,
        clipping="adaptive",
        target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.5,
        max_clipbound=1e4,
        min_clipbound=1e-3,
        unclipped_num_std=1.0,
    )
    return engine, model, optimizer, loader


def train(model, optimizer, loader, epochs):
    norms = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            norms.append(float(optimizer.max_grad_norm))
    return norms


engine, model, optimizer, loader = make()
before = train(model, optimizer, loader, 10)
file = io.BytesIO()
engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
after = train(model, optimizer, loader, 1)

file.seek(0)
engine, model, optimizer, loader = make()
engine.load_checkpoint(path=file, module=model, optimizer=optimizer)
loaded = float(optimizer.max_grad_norm)
resumed = train(model, optimizer, loader, 1)
print(f"the norm to clip to, made with 1000, after 80 steps {before[-1]:.3f}")
print("next steps without a stop:", " ".join(f"{norm:.3f}" for norm in after))
print(f"loaded: {loaded:.3f}; its next steps:", " ".join(f"{norm:.3f}" for norm in resumed))
steps = sum(count for _, _, count in engine.accountant.history)
print(f"the privacy accountant was loaded: it has seen {steps} steps")
is_as_described = before[-1] < 20 and max(after) < 20 and steps == 88
is_as_described &= loaded == 1000.0 and min(resumed) > 40
sys.exit(0 if is_as_described else "the norm that is clipped to is now loaded")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
