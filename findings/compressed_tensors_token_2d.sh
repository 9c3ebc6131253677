#!/usr/bin/env bash
# compressed-tensors 0.20.1: dynamic activations with strategy="token" get one scale for each token
# if they are [batch, sequence, hidden], but one scale for all tokens together if they are [tokens,
# hidden], as the experts of a mixture pass them. A single large token then ruins the others, and a
# token's output depends on what else is in the batch. No error, no warning. Per-token scales of the
# same numbers need not depend on their shape; torch.ao's PerToken gives [8, 16] eight of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==4.57.6 \
    compressed-tensors==0.20.1
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

batch, length, hidden_size = 2, 3, 64
torch.manual_seed(0)
hidden = torch.randn(batch, length, hidden_size)
hidden[0, 1] *= 100
tokens = hidden.reshape(-1, hidden_size)
exact = torch.nn.Sequential(torch.nn.Linear(hidden_size, 16, bias=False))
weight = exact[0].weight.detach().clone()
args = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True)
scheme = QuantizationScheme(targets=["Linear"], input_activations=args)
model = apply_quantization_config(exact, QuantizationConfig(config_groups={"all": scheme})) or exact


def scales_of(values):
    scales, _ = compute_dynamic_scales_and_zp(values, args, model[0])
    return scales.flatten().tolist()


@torch.no_grad()
def errors_of(values):
    """Return the relative error of each token's output."""
    outputs, expected = model(values).reshape(-1, 16), tokens @ weight.T
    return ((outputs - expected).norm(dim=-1) / expected.norm(dim=-1)).tolist()


def rounded(numbers):
    return ", ".join(f"{number:.4f}" for number in numbers)


for name, values in (("[2, 3, 64]", hidden), ("[1, 6, 64]", tokens[None]), ("[6, 64]", tokens)):
    print(f"{name}: scales {rounded(scales_of(values))}")
    print(f"    relative errors of the outputs {rounded(errors_of(values))}")
per_token = (tokens.abs().amax(-1) / 127.5).tolist()
print(f"the largest of each token / 127.5: {rounded(per_token)}")
small = [0, 2, 3, 4, 5]
is_as_described = torch.allclose(torch.tensor(scales_of(hidden)), torch.tensor(per_token))
is_as_described &= scales_of(hidden) == scales_of(tokens[None]) and max(errors_of(hidden)) < 0.05
is_as_described &= len(scales_of(tokens)) == 1
is_as_described &= min(errors_of(tokens)[i] for i in small) > 0.2
sys.exit(0 if is_as_described else "tokens of [tokens, hidden] now have a scale each")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
