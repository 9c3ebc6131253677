#!/usr/bin/env bash
# x-metaformer 0.3.1: the covariance term of VICReg (arXiv:2105.04906, which the README names) is
# computed between the images of a batch, not between the dimensions of the embeddings: torch.cov
# takes rows as variables, so the matrix is batch x batch. The term is there to decorrelate
# dimensions. It is 0 for embeddings whose dimensions are all copies of one, which it shall prevent;
# for independent dimensions, where the paper's vanishes in large batches, it grows with the batch.
# No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 x-metaformer==0.3.1
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import torch
from x_metaformer.pretraining import VICReg

print("torch", torch.__version__, "x-metaformer", version("x-metaformer"))
dimensions = 32
criterion = VICReg(
    torch.nn.Identity(), mlp_in_dim=dimensions, std_coeff=0.0, sim_coeff=0.0, cov_coeff=1.0
)
criterion.projector = torch.nn.Identity()  # the embeddings are those that are passed


def covariance_term(*embeddings):
    """Return the paper's equation 4, summed over both branches."""
    total = 0.0
    for embedding in embeddings:
        centered = embedding - embedding.mean(0)
        covariance = centered.T @ centered / (len(embedding) - 1)
        off_diagonal = covariance - covariance.diag().diag()
        total += off_diagonal.square().sum().item() / dimensions
    return total


is_as_described = True
for batch_size in (64, 1024):
    torch.manual_seed(0)
    independent = torch.randn(2, batch_size, dimensions)
    copies = torch.randn(2, batch_size, 1).expand(-1, -1, dimensions)
    terms = {}
    print(f"batch of {batch_size}, covariance term of VICReg and of the paper:")
    for name, embeddings in (("independent", independent), ("copies of one", copies)):
        term = criterion(*embeddings.clone()).item()
        expected = covariance_term(*embeddings)
        terms[name] = (term, expected)
        print(f"    dimensions {name:13}: {term:10.3f} {expected:10.3f}")
    is_as_described &= terms["independent"][0] > 3 * terms["independent"][1]
    is_as_described &= terms["copies of one"][0] < 1 and terms["copies of one"][1] > 10
sys.exit(0 if is_as_described else "VICReg's covariance now is that of dimensions")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
