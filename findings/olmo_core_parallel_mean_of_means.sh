#!/usr/bin/env bash
# ai2-olmo-core 3.0.0: under tensor parallelism LMHead's loss_reduction="mean", its default, is the
# mean of the ranks' means over their parts of the sequence. So a label weighs more where more are
# ignored: prompts that are masked make loss and gradients others than without tensor parallelism,
# and NaN as soon as a part has no label that counts. "sum" is the same either way. No error, no
# warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 ai2-olmo-core==3.0.0
cat > "$folder/program.py" <<'PROGRAM'
import math
import sys

import torch
import torch.distributed as dist
from olmo_core.nn.layer_norm import LayerNormConfig
from olmo_core.nn.lm_head import LMHeadConfig
from torch.distributed.tensor import Replicate, init_device_mesh

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
batch, length, hidden_size, vocab_size = 2, 8, 16, 32
torch.manual_seed(0)
hidden = torch.randn(batch, length, hidden_size)
all_labels = torch.randint(vocab_size, (batch, length))


def run(labels, reduction, is_parallel):
    """Return the loss, and the gradient of the hidden states."""
    torch.manual_seed(1)
    config = LMHeadConfig(layer_norm=LayerNormConfig(), bias=False)
    head = config.build(d_model=hidden_size, vocab_size=vocab_size)
    if is_parallel:
        head.apply_tp(mesh, input_layouts=(Replicate(), Replicate()))
    states = hidden.clone().requires_grad_()
    loss = head(states, labels=labels, loss_reduction=reduction).loss
    loss = loss.full_tensor() if is_parallel else loss
    loss.backward()
    return loss.item(), states.grad


is_as_described = True
for prompt in (0, 3, 4):
    labels = all_labels.clone()
    labels[:, :prompt] = -100
    for reduction in ("sum", "mean"):
        expected, expected_gradient = run(labels, reduction, False)
        loss, gradient = run(labels, reduction, True)
        scale = expected_gradient.abs().max()
        error = ((gradient - expected_gradient).abs().max() / scale).item()
        if dist.get_rank() == 0:
            print(f"prompts of {prompt} of {length} tokens, {reduction!r}")
            print(f"    one rank {expected:.5f}, two {loss:.5f}, gradients {error:.6f} apart")
        if reduction == "sum" or prompt == 0:
            is_as_described &= abs(loss - expected) < 1e-4 and error < 1e-5
        elif prompt == 3:
            is_as_described &= abs(loss - expected) > 0.01 and error > 0.1
        else:
            is_as_described &= math.isnan(loss) and math.isfinite(expected)
dist.barrier()
dist.destroy_process_group()
sys.exit(0 if is_as_described else "the mean is now that over all labels")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
