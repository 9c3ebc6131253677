#!/usr/bin/env bash
# nvidia-modelopt 0.47.0: quantize leaves a subclass of nn.Linear in full precision if it has a
# forward of its own, also one that only calls nn.Linear's, and another layer of the model is
# quantized. No warning (if no layer is, it raises); a subclass without a forward is quantized.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 nvidia-modelopt==0.47.0 \
    requests==2.34.2 huggingface_hub==2.4.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PROGRAM'
import sys
import warnings

import modelopt.torch.quantization as mtq
import torch
from torch import nn


class Named(nn.Linear):
    pass


class Forwarding(nn.Linear):
    def forward(self, x):
        return super().forward(x)


torch.manual_seed(0)
layers = [nn.Linear(16, 16), Named(16, 16), Forwarding(16, 16)]
names = [type(layer).__name__ for layer in layers]  # modelopt changes classes in place
x = torch.randn(8, 16)
expected = [layer(x) for layer in layers]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = nn.Sequential(*layers)
    mtq.quantize(model, mtq.INT8_DEFAULT_CFG, forward_loop=lambda model: model(x))
outputs = [layer(x) for layer in layers]
is_quantized = {
    name: not before.equal(after)
    for name, before, after in zip(names, expected, outputs, strict=True)
}
about_it = [str(w.message) for w in caught if "Forwarding" in str(w.message)]
print("the output is quantized:", is_quantized, "warnings about it:", about_it)
is_as_described = is_quantized == {"Linear": True, "Named": True, "Forwarding": False}
sys.exit(0 if is_as_described and not about_it else "the subclass is no longer left out")
PROGRAM
