#!/usr/bin/env bash
# adapters 1.3.0: Average("a", "b") multiplies the outputs of n adapters by weights whose sum is 1
# and then takes their mean, which divides by n once more. So two adapters with the same weights
# average to half of one of them, four to a quarter, and a weight of 1 for one of them gives it half
# of its effect. Its documentation calls this the average of the outputs. No error, no warning;
# average_adapter(), which averages parameters, is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==4.57.6 \
    adapters==1.3.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import adapters
import torch
from adapters import LoRAConfig
from adapters.composition import Average
from transformers import BertConfig, BertModel

names = ["one", "two", "three", "four"]
ids = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(0))


def make():
    """Return a model of one layer with adapters of the same parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=50, num_hidden_layers=1, **sizes))
    adapters.init(model)
    for name in names:
        model.add_adapter(name, config=LoRAConfig())
        generator = torch.Generator().manual_seed(1)
        for key, parameter in model.named_parameters():
            if f".{name}." in key:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    model.average_adapter("merged", names[:2])
    return model.eval()


@torch.no_grad()
def query(model, active):
    """Return the outputs of the linear layer for queries, which has LoRA."""
    model.set_active_adapters(active)
    found = []
    linear = model.encoder.layer[0].attention.self.query
    hook = linear.register_forward_hook(lambda module, inputs, outputs: found.append(outputs))
    model(ids)
    hook.remove()
    return found[0]


is_as_described = True
model = make()
base = query(model, None)
whole = query(model, "one") - base
print("adapters of the same parameters; what they add to the outputs, as a part of one's:")
for label, active, part in (
    ("two", "two", 1),
    ("average_adapter of one, two", "merged", 1),
    ("Average(one)", Average("one"), 1),
    ("Average(one, two)", Average("one", "two"), 1 / 2),
    ("Average of the four", Average(*names), 1 / 4),
    ("Average(one, two), weights 1 and 0", Average("one", "two", weights=[1.0, 0.0]), 1 / 2),
):
    added = query(model, active) - base
    measured = ((added * whole).sum() / (whole * whole).sum()).item()
    print(f"    {label:36} {measured:.4f}")
    is_as_described &= abs(measured - part) < 1e-3
sys.exit(0 if is_as_described else "Average no longer divides by the number of adapters twice")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
