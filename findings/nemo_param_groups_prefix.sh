#!/usr/bin/env bash
# nemo-toolkit 3.0.0: optim_param_groups gives modules learning rates of their own, and parameters
# that it does not name the default one. Parameters of a module whose name only begins with that of
# a named one (encoder_projection beside encoder) are in no group at all: the optimizer does not
# have them, and they stay as they were initialized. No error, no warning; with another name they
# are trained at the default learning rate.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 "nemo-toolkit[core]==3.0.0"
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

warnings.filterwarnings("ignore")

import nemo.utils
import torch
from nemo.core.classes import ModelPT
from omegaconf import OmegaConf

nemo.utils.logging.setLevel(logging.ERROR)


class Model(ModelPT):
    def __init__(self, projection):
        config = {
            "optim_param_groups": {"encoder": {"lr": 0.1}},
            "optim": {"name": "sgd", "lr": 0.01},
        }
        super().__init__(cfg=OmegaConf.create(config))
        torch.manual_seed(0)
        self.encoder = torch.nn.Linear(4, 4)
        self.add_module(projection, torch.nn.Linear(4, 4))
        self.head = torch.nn.Linear(4, 1)

    def setup_training_data(self, config):
        """Do nothing: the training data is made below."""

    def setup_validation_data(self, config):
        """Do nothing."""

    @classmethod
    def list_available_models(cls):
        return []

    def forward(self, x):
        for module in self.children():
            x = module(x)
        return x


is_as_described = True
for projection in ("projection", "encoder_projection"):
    model = Model(projection)
    optimizer, _ = model.setup_optimization()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for seed in range(5):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    print(f"encoder, {projection} and head; a group of its own for encoder; after five steps")
    for group in optimizer.param_groups:
        print(f"    a group of {len(group['params'])} parameters, learning rate {group['lr']}")
    unchanged = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    with_gradient = all(parameter.grad.norm() > 0 for parameter in model.parameters())
    print(f"    not changed: {unchanged}; each has a gradient: {with_gradient}")
    if projection == "projection":
        is_as_described &= unchanged == []
    else:
        is_as_described &= unchanged == [f"{projection}.weight", f"{projection}.bias"]
    is_as_described &= with_gradient
sys.exit(0 if is_as_described else "the parameters of all modules are trained")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
