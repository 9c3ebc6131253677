#!/usr/bin/env bash
# torch 2.13.0: F.linear_cross_entropy with LinearCrossEntropyOptions() adds the losses of chunks in
# bf16 if the operands are. The sum stops growing once a chunk's loss is below its last digit: a
# mean of 8.40 comes out as 8.0, in chunks of 8 tokens as 2.0. No error, no warning. The gradient of
# the bias stops in the same way. Without options both are right to bf16's last digits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F
from torch.nn import LinearCrossEntropyOptions

T, H, V = 8192, 16, 4096
torch.manual_seed(0)
hidden = torch.randn(T, H, dtype=torch.bfloat16)
weight = 0.1 * torch.randn(V, H, dtype=torch.bfloat16)
labels = torch.randint(V, (T,))


def loss_and_dbias(dtype, options):
    bias = torch.zeros(V, dtype=dtype, requires_grad=True)
    operands = hidden.to(dtype), weight.to(dtype), labels
    loss = F.linear_cross_entropy(*operands, linear_bias=bias, options=options)
    loss.backward()
    return loss.item(), bias.grad.double()


exact_loss, exact_dbias = loss_and_dbias(torch.float64, None)
print(f"fp64: loss {exact_loss:.4f}")
ways = {
    "bf16, no options": None,
    "bf16, LinearCrossEntropyOptions()": LinearCrossEntropyOptions(),
    "bf16, batch_chunk_size=8": LinearCrossEntropyOptions(batch_chunk_size=8),
}
losses, errors = [], []
for name, options in ways.items():
    loss, dbias = loss_and_dbias(torch.bfloat16, options)
    losses.append(loss)
    errors.append(float((dbias - exact_dbias).norm() / exact_dbias.norm()))
    print(f"{name}: loss {loss:.4f}, dbias off by {errors[-1]:.1%}")
plain, chunked, small = losses
is_as_seen = abs(plain - exact_loss) < 0.05 < exact_loss - chunked and small < exact_loss / 2
grows = errors[0] < 0.01 < 0.05 < errors[1] < errors[2]
sys.exit(0 if is_as_seen and grows else "the chunked loss no longer stops growing")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
