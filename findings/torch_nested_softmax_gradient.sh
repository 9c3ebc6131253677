#!/usr/bin/env bash
# torch 2.13.0: the gradient of softmax(1) of a jagged nested tensor, over each sequence's tokens as
# in attention pooling, is wrong; the softmax is right. Its backward takes dimension 1 for that of
# the packed values, which is the next one: it computes the gradient of a softmax over the features
# of a token. No error, no warning; softmax(-1) has the right gradient.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch

torch.manual_seed(0)
lengths, heads = (3, 1, 4), 2
scores = [torch.randn(length, heads, dtype=torch.float64) for length in lengths]
upstream = torch.randn(sum(lengths), heads, dtype=torch.float64)


def show(name, values):
    print(f"    {name:24}", [round(value, 3) for value in values[:4, 0].tolist()], "...")


is_as_described = True
for dim in (1, -1):
    nested = torch.nested.nested_tensor(scores, layout=torch.jagged, requires_grad=True)
    weights = nested.softmax(dim)
    (weights.values() * upstream).sum().backward()
    # The oracle: each sequence on its own, as a plain tensor.
    alone = [sequence.clone().requires_grad_() for sequence in scores]
    of_alone = torch.cat([sequence.softmax(0 if dim == 1 else -1) for sequence in alone])
    (of_alone * upstream).sum().backward()
    expected = torch.cat([sequence.grad for sequence in alone])
    gradient = nested.grad.values()
    print(f"softmax({dim}) of sequences of {lengths} tokens, tokens 0 to 3 of head 0")
    show("nested", weights.detach().values())
    show("alone", of_alone.detach())
    show("gradient, nested", gradient)
    show("gradient, alone", expected)
    is_as_described &= torch.allclose(weights.values(), of_alone)
    if dim == 1:
        over_heads = of_alone * (upstream - (upstream * of_alone).sum(1, keepdim=True))
        is_as_described &= torch.allclose(gradient, over_heads)
        is_as_described &= not torch.allclose(gradient, expected)
    else:
        is_as_described &= torch.allclose(gradient, expected)
sys.exit(0 if is_as_described else "softmax(1) of a nested tensor no longer has another's gradient")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
