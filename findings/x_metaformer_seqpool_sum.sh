#!/usr/bin/env bash
# x-metaformer 0.3.1: use_seqpool=True (in the README's example: "use sequence pooling" from CCT,
# "Escaping the Big Data Paradigm with Compact Transformers", arXiv:2104.05704) sums all positions.
# The paper weighs them by a softmax of their scores; here the softmax goes over the one channel
# that the scores have, so each weight is 1. The pooled output grows with the number of positions,
# and the scores' weight and bias have a gradient of 0: they are never trained. No error, no
# warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 x-metaformer==0.3.1
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import torch
from x_metaformer import ConvFormer
from x_metaformer.layers.mixing_layers import SeqPool

print("torch", torch.__version__, "x-metaformer", version("x-metaformer"))
is_as_described = True
for size in (2, 8):
    torch.manual_seed(0)
    features = torch.randn(4, 16, size, size)
    pooling = SeqPool(1, 16)
    pooled = pooling(features)
    pooled.square().sum().backward()
    scores = pooling.score(features).flatten(2)
    expected = (features.flatten(2) * scores.softmax(-1)).sum(-1)
    gradients = [parameter.grad.abs().max().item() for parameter in pooling.parameters()]
    print(f"{size} x {size} positions, norms of the pooled features:")
    print(f"    SeqPool:           {pooled.norm():.3f}")
    print(f"    sum of positions:  {features.sum((2, 3)).norm():.3f}")
    print(f"    the paper's:       {expected.norm():.3f}")
    print(f"    largest gradient of the scores' weight {gradients[0]}, bias {gradients[1]}")
    is_as_described &= torch.allclose(pooled, features.sum((2, 3)), atol=1e-5)
    is_as_described &= max(gradients) == 0 and pooled.norm().item() > 2 * expected.norm().item()
last = SeqPool(-1, 16)
is_as_described &= torch.allclose(last(features.permute(0, 2, 3, 1)), pooled, atol=1e-5)

torch.manual_seed(0)
model = ConvFormer(in_channels=3, depths=(1, 1, 1, 1), dims=(16, 32, 48, 64), use_seqpool=True)
model(torch.randn(2, 3, 64, 64)).square().sum().backward()
untrained = [
    name
    for name, parameter in model.named_parameters()
    if name.startswith("pooling_layer") and parameter.grad.abs().max() == 0
]
print("parameters of a ConvFormer's pooling with a gradient of 0:", untrained)
is_as_described &= len(untrained) == 2
sys.exit(0 if is_as_described else "SeqPool now weighs positions")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
