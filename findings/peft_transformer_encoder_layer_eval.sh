#!/usr/bin/env bash
# peft 0.21.2: an adapter on linear1 and linear2 of torch's nn.TransformerEncoderLayer works in
# training, but after eval() the layer takes its fast path, which reads the two weights itself. So
# evaluation gives exactly the outputs of the model without adapter; after merge_and_unload() they
# are those of training. LoRA, IA3, LoHa, OFT and VeRA alike. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 peft==0.21.2
cat > "$folder/program.py" <<'PROGRAM'
import copy
import sys

import torch
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, VeraConfig, get_peft_model

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
base = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
for parameter in base.parameters():
    if parameter.ndim > 1:
        torch.nn.init.normal_(parameter.data, std=0.3)
inputs = torch.randn(8, 5, 16)
target = torch.randn(8, 5, 16)


def loss_of(model):
    with torch.no_grad():
        return (model(inputs) - target).square().mean().item()


targets = {"target_modules": ["linear1", "linear2"]}
before = loss_of(copy.deepcopy(base).train())
print(f"the model without adapter: loss {before:.6f}")
is_as_described = True
for config in (
    LoraConfig(r=4, **targets),
    IA3Config(feedforward_modules=[], **targets),
    LoHaConfig(r=4, **targets),
    OFTConfig(r=0, oft_block_size=4, **targets),
    VeraConfig(r=4, **targets),
):
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(base), config)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(100):
        optimizer.zero_grad()
        (model(inputs) - target).square().mean().backward()
        optimizer.step()
    in_training = loss_of(model.train())  # there is no dropout
    in_evaluation = loss_of(model.eval())
    merged = loss_of(copy.deepcopy(model).merge_and_unload().eval())
    print(f"{config.peft_type.value}, trained: loss {in_training:.6f} in train(),", end=" ")
    print(f"{in_evaluation:.6f} in eval(), {merged:.6f} merged, in eval()")
    is_as_described &= abs(in_evaluation - before) < 1e-5
    is_as_described &= abs(in_training - merged) < 1e-5 and in_training < before - 0.01
sys.exit(0 if is_as_described else "eval() no longer switches these adapters off")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
