#!/usr/bin/env bash
# bitsandbytes 0.50.2, CPU with AVX-512: dequantize_4bit, and with it forward and backward of
# Linear4bit in training, gives wrong numbers if the weight's last dimension is a multiple of 16
# but not of the block size (64 by default): it takes the wrong blocks' scales. So is 4304, the MLP
# of the SigLIP vision tower of PaliGemma and Gemma 3. No error, no warning; sizes that are not a
# multiple of 16, as 100, are right, and so is the quantized weight itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 bitsandbytes==0.50.2
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch

warnings.filterwarnings("ignore")
import bitsandbytes.functional as F  # noqa: E402
from bitsandbytes.nn import Linear4bit  # noqa: E402

NF4 = torch.tensor([
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
])  # fmt: skip
if "AVX512" not in torch.backends.cpu.get_cpu_capability():
    sys.exit("this is so on CPUs with AVX-512 alone")
torch.manual_seed(0)
torch.set_num_threads(1)


def dequantize(codes, scales, block_size, shape):
    """Return what the codes, two in a byte, and the scales of blocks say."""
    codes = codes.flatten()
    indices = torch.stack([codes >> 4, codes & 15], dim=1).flatten()[: shape.numel()].long()
    blocks = torch.arange(shape.numel()) // block_size
    return (NF4[indices] * scales[blocks]).view(shape)


def relative(error, reference):
    return (error.norm() / reference.norm()).item()


is_as_described = True
print("relative errors of nf4, block size 64, by size of the last dimension")
for size in (64, 100, 1152, 96, 160, 4304):
    weight = torch.randn(128, size) * torch.linspace(0.1, 2.0, 128).view(-1, 1)
    codes, state = F.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    right = relative(dequantize(codes, state.absmax, 64, weight.shape) - weight, weight)
    dequantized = relative(F.dequantize_4bit(codes, state) - weight, weight)
    layer = Linear4bit(size, 128, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.load_state_dict({"weight": weight})
    layer = layer.to("cpu")
    inputs = torch.randn(16, size, requires_grad=True)
    outputs = layer(inputs)
    expected = inputs.detach() @ weight.T
    upstream = torch.randn_like(outputs)
    outputs.backward(upstream)
    forward = relative(outputs.detach() - expected, expected)
    backward = relative(inputs.grad - upstream @ weight, upstream @ weight)
    print(f"    {size:4}: {right:.2f} by codes and scales, {dequantized:.2f} dequantized;", end=" ")
    print(f"Linear4bit: {forward:.2f} forward, {backward:.2f} backward")
    is_as_described &= right < 0.15
    if size in (96, 160, 4304):
        is_as_described &= min(dequantized, forward, backward) > 0.2
    else:
        is_as_described &= max(dequantized, forward, backward) < 0.15
sys.exit(0 if is_as_described else "sizes that are no multiple of the block size are right")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
