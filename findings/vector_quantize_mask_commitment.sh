#!/usr/bin/env bash
# vector-quantize-pytorch 1.32.0: VectorQuantize with a mask (or lens) compares the codes with the
# inputs as they came, in its commitment loss; without one with what it quantized, the inputs after
# their projection, split into heads, and of length 1 for cosine similarity. So with
# use_cosine_sim=True, and with several heads whose codebook_dim is the size of the input (there
# PyTorch warns of the shapes), even a mask that is True everywhere changes loss and gradient. No
# error, and for cosine similarity no warning; with neither it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 vector-quantize-pytorch==1.32.0
cat > "$folder/program.py" <<'PROGRAM'
import copy
import sys

import torch
from vector_quantize_pytorch import VectorQuantize

torch.set_num_threads(1)
is_as_described = True
for name, options in (
    ("plain", {}),
    ("use_cosine_sim=True", {"use_cosine_sim": True}),
    ("heads=2, separate_codebook_per_head=True", {"heads": 2, "separate_codebook_per_head": True}),
):
    torch.manual_seed(0)
    quantizer = VectorQuantize(dim=16, codebook_size=32, commitment_weight=1.0, **options).train()
    inputs = 3 * torch.randn(2, 10, 16)
    losses, gradients, quantized = [], [], []
    for mask in (None, torch.ones(2, 10, dtype=torch.bool)):
        leaf = inputs.clone().requires_grad_()
        outputs, _, loss = copy.deepcopy(quantizer)(leaf, mask=mask)
        loss.sum().backward()
        losses.append(loss.item())
        gradients.append(leaf.grad)
        quantized.append(outputs)
    cosine = torch.cosine_similarity(gradients[0].flatten(), gradients[1].flatten(), 0).item()
    print(f"{name}: a loss of {losses[0]:.4f} without mask,", end=" ")
    print(f"{losses[1]:.4f} with one that is True everywhere;")
    print(f"    norms of the gradients {gradients[0].norm():.4f}", end=" ")
    print(f"and {gradients[1].norm():.4f}, cosine between them {cosine:.3f}")
    is_as_described &= torch.equal(quantized[0], quantized[1])
    if options:
        is_as_described &= abs(losses[1] - losses[0]) > 0.1 * losses[0]
        is_as_described &= not torch.allclose(gradients[0], gradients[1], rtol=0.1)
    else:
        is_as_described &= abs(losses[1] - losses[0]) < 1e-5 and cosine > 0.9999
sys.exit(0 if is_as_described else "a mask no longer changes what the codes are compared with")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
