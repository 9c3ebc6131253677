#!/usr/bin/env bash
# x-metaformer 0.3.1: the attention of CAFormer mixes the images of a batch. Queries, keys and
# values, of shape (batch, 3 * heads * head_dim, height, width), are reshaped as if the 3 came first
# and the batch second, so an image attends to others, and its queries are another image's keys. In
# evaluation, too, an image's output changes with the other images of its batch. The paper it
# implements ("MetaFormer Baselines for Vision", arXiv:2210.13452) has ordinary self-attention
# within an image. Without attention (ConvFormer), outputs do not depend on the batch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 x-metaformer==0.3.1
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import torch
from x_metaformer import CAFormer, ConvFormer
from x_metaformer.layers.attention_layers import Attention

print("torch", torch.__version__, "x-metaformer", version("x-metaformer"))
torch.manual_seed(0)
images = torch.randn(4, 3, 64, 64)
others = images.clone()
others[1:] = torch.randn(3, 3, 64, 64)  # all but the first image


def change(module, inputs, other_inputs):
    """Return by how much the first image's output changes with the rest of the batch, relative."""
    with torch.no_grad():
        outputs = module(inputs)
        difference = outputs[0] - module(other_inputs)[0]
    return (difference.norm() / outputs[0].norm()).item()


changes = {}
for kind in (ConvFormer, CAFormer):
    torch.manual_seed(0)
    model = kind(
        in_channels=3, depths=(1, 1, 1, 1), dims=(16, 32, 48, 64), num_heads=2, head_dim=16
    ).eval()
    changes[kind.__name__] = change(model, images, others)
torch.manual_seed(0)
features = torch.randn(4, 8, 5, 6)
other_features = features.clone()
other_features[1:] = torch.randn(3, 8, 5, 6)
first = Attention(1, 8, head_dim=4, num_heads=2).eval()
changes["Attention, channels first"] = change(first, features, other_features)
last = Attention(-1, 8, head_dim=4, num_heads=2).eval()
changes["Attention, channels last"] = change(
    last, features.permute(0, 2, 3, 1), other_features.permute(0, 2, 3, 1)
)
print("the first image's output, with other images in the rest of the batch:")
for name, number in changes.items():
    print(f"    {name}: changes by {number:.2%}")
is_as_described = changes.pop("ConvFormer") < 1e-5 and all(
    number > 1e-3 for number in changes.values()
)
sys.exit(0 if is_as_described else "attention no longer mixes the images of a batch")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
