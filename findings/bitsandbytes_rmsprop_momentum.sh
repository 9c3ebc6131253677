#!/usr/bin/env bash
# bitsandbytes 0.50.2: RMSprop, RMSprop32bit and RMSprop8bit take momentum, which "speeds up the
# optimizer by taking bigger steps", and ignore it: with momentum=0.9 weights are those without, to
# the bit, where torch.optim.RMSprop goes several times as far. Without momentum both agree;
# centered=True, not supported either, raises an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 bitsandbytes==0.50.2
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

warnings.filterwarnings("ignore")
logging.disable()
import bitsandbytes as bnb  # noqa: E402
import torch  # noqa: E402

torch.manual_seed(0)
weights = torch.randn(64, 128)
direction = torch.randn(64, 128)


def train(kind, **options):
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = kind([parameter], lr=1e-3, **options)
    for _ in range(20):
        parameter.grad = direction.clone()
        optimizer.step()
    return parameter.detach()


def way(trained):
    return (trained - weights).abs().mean().item()


plain = train(torch.optim.RMSprop)
with_momentum = train(torch.optim.RMSprop, momentum=0.9)
print(f"torch: weights move by {way(plain):.4f}, with momentum=0.9 by {way(with_momentum):.4f}")
is_as_described = way(with_momentum) > 3 * way(plain)
for kind in (bnb.optim.RMSprop, bnb.optim.RMSprop32bit, bnb.optim.RMSprop8bit):
    without, given = train(kind), train(kind, momentum=0.9)
    is_ignored = torch.equal(without, given)
    print(f"bitsandbytes, {kind.__name__:12}: by {way(without):.4f}, with momentum=0.9", end=" ")
    print(f"by {way(given):.4f}; the same weights: {is_ignored}")
    is_as_described &= is_ignored and abs(way(without) / way(plain) - 1) < 0.05
sys.exit(0 if is_as_described else "RMSprop's momentum is no longer ignored")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
