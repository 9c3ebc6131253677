#!/usr/bin/env bash
# deepspeed 0.19.8: TiledMLP gives the MLP's weights no gradient if its input requires none, and its
# output then requires none either. So in a model whose embeddings and attention are frozen, as for
# LoRA on the MLPs alone, no MLP is trained, while the output layer, if trained too, is. No error,
# no warning (reentrant torch.utils.checkpoint, which has the same limit, warns); without tiles, and
# with an input that requires a gradient, all are trained.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet deepspeed==0.19.8
cat > "$folder/program.py" <<'PROGRAM'
import os
import sys
import warnings

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

torch.set_num_threads(1)
torch.manual_seed(0)


def tiled(mlp, x):
    weights = [weight for weight in mlp.parameters() if weight.requires_grad]
    return TiledMLP.apply(lambda module, tile: module(tile), mlp, x, 2, weights)


def plain(mlp, x):
    return mlp(x)


def gradients(compute, with_trained_embedding):
    """Return the norms of the gradients of two MLPs and a head over embeddings; None if none."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(10, 8)
    embedding.requires_grad_(with_trained_embedding)
    mlps = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU()) for _ in range(2)]
    head = torch.nn.Linear(8, 10)
    x = embedding(torch.arange(10)[None])
    for mlp in mlps:
        x = x + compute(mlp, x)
    loss = torch.nn.functional.cross_entropy(head(x)[0], torch.arange(10).flip(0))
    loss.backward()
    weights = (mlps[0][0].weight, mlps[1][0].weight, head.weight)
    return [None if w.grad is None else round(w.grad.norm().item(), 5) for w in weights]


is_as_described = True
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for with_trained_embedding in (True, False):
        expected = gradients(plain, with_trained_embedding)
        got = gradients(tiled, with_trained_embedding)
        print("embeddings", "trained:" if with_trained_embedding else "frozen:")
        print(f"    gradients of two MLPs and a head: plain {expected}, tiled {got}")
        is_as_described &= None not in expected
        described = expected if with_trained_embedding else [None, None, expected[2]]
        is_as_described &= got == described
print(f"warnings: {[str(warning.message) for warning in caught]}")
is_as_described &= caught == []
sys.exit(0 if is_as_described else "TiledMLP trains its weights otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
