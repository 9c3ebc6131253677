#!/usr/bin/env bash
# optimuon 0.1.1: Muon by default (gram_ns=True) casts each update to fp16 before it divides it by
# its norm. An orthogonalized update does not depend on the gradient's scale, and with
# gram_ns=False, in bf16, it does not. By default a 512 x 512 gradient whose elements are about 3e-7
# moves the weights in another direction, since many elements of the first update, a tenth of it,
# are flushed to 0; one of about 3e-8 does not move them at all; neither does one of norm 5e6, since
# the update's norm overflows. All these norms are far above ns_eps=1e-6. No error, no warning. Of
# fp16 the docstring only says that it has "better precision than bfloat16 for the Gram matrix".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 optimuon==0.1.1
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import torch
from optimuon import Muon

print("torch", torch.__version__, "optimuon", version("optimuon"))
torch.manual_seed(0)
gradient = torch.randn(512, 512)
left, _, right = torch.linalg.svd(gradient)
orthogonalized = left @ right


def update(scale, **options):
    """Return the first step of lr 1 on the gradient times ``scale``, with its sign changed."""
    weight = torch.nn.Parameter(torch.zeros(512, 512))
    optimizer = Muon([weight], lr=1.0, **options)
    weight.grad = gradient * scale
    optimizer.step()
    return -weight.detach()


steps = {}
for name, options in (("by default", {}), ("gram_ns=False", {"gram_ns": False})):
    print(f"{name}:")
    for scale in (1e4, 1.0, 1e-4, 1e-6, 3e-7, 1e-7, 3e-8):
        step = update(scale, **options)
        cosine = torch.cosine_similarity(step.flatten(), orthogonalized.flatten(), dim=0).item()
        norm = step.norm().item()
        steps[name, scale] = (norm, cosine)
        print(f"    gradient of norm {(gradient * scale).norm():.1e}: ", end="")
        print(f"step of norm {norm:.2f}, cosine to the orthogonalized gradient {cosine:.3f}")
is_as_described = all(steps["by default", scale][1] > 0.98 for scale in (1.0, 1e-4))
is_as_described &= steps["by default", 1e4][0] == steps["by default", 3e-8][0] == 0
is_as_described &= steps["by default", 3e-7][1] < 0.8 and steps["by default", 1e-7][1] < 0.3
is_as_described &= all(
    norm > 22 and cosine > 0.98
    for (name, _), (norm, cosine) in steps.items()
    if name == "gram_ns=False"
)
sys.exit(0 if is_as_described else "steps no longer depend on the gradient's scale")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
