#!/usr/bin/env bash
# adapters 1.3.0: a DoRA adapter whose alpha is not its r computes something else merged than not.
# Forward scales B A x by alpha / r, but not the B A in the norm by which it divides;
# merge_adapter() scales neither, so the merged model is that of alpha = r. DoRA would scale both.
# With alpha = r all are the same. LoRA merges right. No error, no warning.
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
import torch.nn.functional as F
from adapters import DoRAConfig, LoRAConfig
from transformers import LlamaConfig, LlamaModel
from transformers.utils import logging

logging.set_verbosity_error()
ids = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(0))


def make(config):
    """Return a model, and its linear layer for queries, which has no bias."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    model = LlamaModel(LlamaConfig(vocab_size=50, num_hidden_layers=1, **sizes))
    adapters.init(model)
    model.add_adapter("learned", config=config)
    for name, parameter in model.named_parameters():
        if name.endswith((".lora_A", ".lora_B")):
            torch.nn.init.normal_(parameter, std=0.1)
    model.set_active_adapters("learned")
    return model.eval(), model.layers[0].self_attn.q_proj


@torch.no_grad()
def run(model, linear):
    """Return what goes into the linear layer and what comes out."""
    found = []
    hook = linear.register_forward_hook(lambda module, inputs, out: found.extend([inputs[0], out]))
    model(ids)
    hook.remove()
    return found


@torch.no_grad()
def reference(linear, inputs, scaling, is_dora):
    """Return the outputs of the paper's formula, in fp64."""
    lora = linear.loras["learned"]
    weight = linear.weight.double()
    adapted = weight + scaling * lora.lora_B.double() @ lora.lora_A.double()
    if is_dora:
        adapted *= weight.norm(dim=1, keepdim=True) / adapted.norm(dim=1, keepdim=True)
    return F.linear(inputs.double(), adapted)


is_as_described = True
for cls, alpha in ((LoRAConfig, 16), (DoRAConfig, 8), (DoRAConfig, 16)):
    is_dora = cls is DoRAConfig
    model, linear = make(cls(r=8, alpha=alpha))
    inputs, active = run(model, linear)
    expected = reference(linear, inputs, alpha / 8, is_dora)
    unscaled = reference(linear, inputs, 1, is_dora)
    model.merge_adapter("learned")
    _, merged = run(model, linear)
    print(f"{cls.__name__}(r=8, alpha={alpha}), outputs up to {expected.abs().max():.4f}")
    distances = []
    for label, left, right in (
        ("active from the formula", active, expected),
        ("merged from the formula", merged, expected),
        ("merged from active", merged, active),
        ("merged from the formula with alpha = r", merged, unscaled),
    ):
        distances.append((left - right).abs().max().item())
        print(f"    {label:40} {distances[-1]:.6f}")
    if is_dora and alpha == 16:
        is_as_described &= min(distances[:3]) > 0.02 and distances[3] < 1e-5
    else:
        is_as_described &= max(distances[:3]) < 1e-5
sys.exit(0 if is_as_described else "DoRA's alpha now counts alike, merged or not")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
