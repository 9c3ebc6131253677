#!/usr/bin/env bash
# xlstm 2.0.6: CausalConv1d with channel_mixing=True ("If True, it mixes the convolved features
# across channels") computes something else step by step than for a whole sequence. step() takes the
# weights of the first input channel for every channel, as if the convolution were depthwise, so
# cached decoding differs from the forward pass that was trained. Without channel_mixing both agree.
# No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 packaging==26.4
"$folder/venv/bin/pip" install --quiet --no-deps xlstm==2.0.6
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import torch
from xlstm.components.conv import CausalConv1d, CausalConv1dConfig

print("torch", torch.__version__, "xlstm", version("xlstm"))
errors = {}
for channel_mixing in (False, True):
    torch.manual_seed(0)
    config = CausalConv1dConfig(feature_dim=8, kernel_size=4, channel_mixing=channel_mixing)
    convolution = CausalConv1d(config)
    sequence = torch.randn(2, 12, 8)
    with torch.no_grad():
        whole = convolution(sequence)
        state, outputs = None, []
        for token in sequence.split(1, dim=1):
            output, state = convolution.step(token, state)
            outputs.append(output)
        stepwise = torch.cat(outputs, dim=1)
        # what step() computes: the first input channel's weights, applied to each channel
        padded = torch.nn.functional.pad(sequence, (0, 0, 3, 0)).transpose(1, 2)
        depthwise = torch.nn.functional.conv1d(
            padded, convolution.conv.weight[:, :1], convolution.conv.bias, groups=8
        ).transpose(1, 2)
    errors[channel_mixing] = ((stepwise - whole).norm() / whole.norm()).item()
    print(f"channel_mixing={channel_mixing}: weight {tuple(convolution.conv.weight.shape)}")
    print(f"    steps differ from the whole sequence by {errors[channel_mixing]:.1%}, ", end="")
    print(f"from a depthwise convolution by {(stepwise - depthwise).abs().max():.1e}")
is_as_described = errors[False] < 1e-5 and errors[True] > 0.3
is_as_described &= torch.allclose(stepwise, depthwise, atol=1e-5)
sys.exit(0 if is_as_described else "step() now mixes channels as forward() does")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
