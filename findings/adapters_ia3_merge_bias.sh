#!/usr/bin/env bash
# adapters 1.3.0: merge_adapter() of an (IA)3 adapter scales the weight of a linear layer, but not
# its bias, which is scaled too as long as the adapter is active and not merged. So a merged model
# with biases (BERT, RoBERTa, GPT-2) computes something else. No error, no warning. Without biases,
# and with LoRA, both are the same. PEFT's (IA)3 scales the bias when it merges.
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
from adapters import IA3Config, LoRAConfig
from transformers import BertConfig, BertModel
from transformers.utils import logging

logging.set_verbosity_error()
ids = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(0))


def make(config, has_biases):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=50, num_hidden_layers=2, **sizes))
    for name, parameter in model.named_parameters():
        if has_biases and name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    adapters.init(model)
    model.add_adapter("learned", config=config)
    for name, parameter in model.named_parameters():
        if name.endswith((".lora_A", ".lora_B")):
            parameter.data += 0.3 * torch.randn(parameter.shape)
    model.set_active_adapters("learned")
    return model.eval()


@torch.no_grad()
def run(model):
    """Return the outputs of the first linear layer for values, and of the model."""
    found = []
    value = model.encoder.layer[0].attention.self.value
    hook = value.register_forward_hook(lambda module, inputs, outputs: found.append(outputs))
    outputs = model(ids).last_hidden_state
    hook.remove()
    return found[0], outputs, value


is_as_described = True
for cls in (LoRAConfig, IA3Config):
    for has_biases in (False, True):
        model = make(cls(), has_biases)
        value, outputs, linear = run(model)
        scale = linear.loras["learned"].delta_w.detach().flatten()
        bias = linear.bias.detach().clone()
        model.merge_adapter("learned")
        value_merged, outputs_merged, _ = run(model)
        of_value = (value_merged - value).abs().max().item()
        of_model = (outputs_merged - outputs).abs().max().item()
        print(f"{cls.__name__}, {'with' if has_biases else 'without'} biases")
        print(f"    values of the first layer: {of_value:.6f} apart, merged and not")
        print(f"    outputs of the model:      {of_model:.6f} apart")
        if cls is IA3Config and has_biases:
            missing = (value_merged - value - bias * (1 - scale)).abs().max().item()
            print(f"    values, apart from the bias times (1 - scale): {missing:.6f}")
            is_as_described &= of_value > 0.05 and of_model > 0.01 and missing < 1e-5
        else:
            is_as_described &= of_value < 1e-5 and of_model < 1e-4
sys.exit(0 if is_as_described else "a merged (IA)3 adapter now scales the bias")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
