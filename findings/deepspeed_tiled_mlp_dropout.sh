#!/usr/bin/env bash
# deepspeed 0.19.8: TiledMLP and sequence_tiled_compute compute forward again in backward, but with
# new random numbers. So with dropout in the MLP, its own or that of LoRA, the gradient is that of
# other dropped elements than those that made the output: not of the loss, and not zero where an
# element was dropped. No error, no warning; torch.utils.checkpoint, which also computes again,
# restores the random state, and without dropout the gradient is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet deepspeed==0.19.8
cat > "$folder/program.py" <<'PROGRAM'
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP, sequence_tiled_compute
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
SHARDS = 2


class Mlp(torch.nn.Module):
    """A linear layer and dropout: output = factors * (x @ weight.T), whose sum is the loss."""

    def __init__(self, probability):
        super().__init__()
        self.up = torch.nn.Linear(8, 8, bias=False, dtype=torch.float64)
        self.dropout = torch.nn.Dropout(probability)

    def forward(self, x):
        return self.dropout(self.up(x))


def tiled_mlp(mlp, x):
    return TiledMLP.apply(lambda module, tile: module(tile), mlp, x, SHARDS, [mlp.up.weight])


def tiled_compute(mlp, x):
    return sequence_tiled_compute(
        fn=lambda x: mlp(x),
        seqlen=x.shape[1],
        shards=SHARDS,
        kwargs_to_shard={"x": x},
        kwargs_to_pass={},
        grad_requiring_tensor_key="x",
        compute_params=[mlp.up.weight],
        output_unshard_dimension=1,
        output_reduction=None,
    )


ways = {
    "checkpoint": lambda mlp, x: checkpoint(mlp, x, use_reentrant=False),
    "TiledMLP": tiled_mlp,
    "sequence_tiled_compute": tiled_compute,
}
is_as_described = True
for probability in (0.0, 0.5):
    for name, compute in ways.items():
        torch.manual_seed(0)
        mlp = Mlp(probability)
        x = torch.randn(1, 16, 8, dtype=torch.float64, requires_grad=True)
        output = compute(mlp, x)
        output.sum().backward()
        factors = (output / (x @ mlp.up.weight.T)).detach()  # 0 or 1 / (1 - probability)
        expected_x = factors @ mlp.up.weight.detach()
        expected_weight = factors[0].T @ x[0].detach()
        error_x = ((x.grad - expected_x).norm() / expected_x.norm()).item()
        error_weight = (
            (mlp.up.weight.grad - expected_weight).norm() / expected_weight.norm()
        ).item()
        print(f"dropout {probability}, {name}: relative error of the gradients", end=" ")
        print(f"of x {error_x:.1e}, of the weight {error_weight:.1e}")
        is_right = probability == 0.0 or name == "checkpoint"
        if is_right:
            is_as_described &= error_x < 1e-9 and error_weight < 1e-9
        else:
            is_as_described &= error_x > 0.1 and error_weight > 0.1
sys.exit(0 if is_as_described else "the gradients with dropout are others now")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
