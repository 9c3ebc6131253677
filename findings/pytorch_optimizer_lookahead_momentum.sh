#!/usr/bin/env bash
# pytorch_optimizer 4.1.0: Lookahead's pullback_momentum is to reset or pull back the momentum of
# the optimizer inside at each interpolation. It does so with state named momentum_buffer, which SGD
# has. Adam, AdamW, AdaBelief, Lion and most others keep their momentum as exp_avg, so that with
# them "reset" and "pullback" do what "none" does, but put buffers that nobody reads into their
# state and checkpoints. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 pytorch_optimizer==4.1.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from pytorch_optimizer import AdaBelief, Lion, Lookahead

torch.set_num_threads(1)


def train(optimizer_class, options, pullback_momentum, resets_itself=False):
    """Return the parameters after 12 steps, and the names of the inner optimizer's state."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5))
    inner = optimizer_class([parameter], lr=0.1, **options)
    optimizer = Lookahead(inner, k=3, alpha=0.5, pullback_momentum=pullback_momentum)
    generator = torch.Generator().manual_seed(1)
    for step in range(12):
        parameter.grad = 1 + torch.randn(5, generator=generator)
        optimizer.step()
        if resets_itself and step % 3 == 2:
            for name in {"momentum_buffer", "exp_avg"} & set(inner.state[parameter]):
                inner.state[parameter][name].zero_()
    return parameter.detach(), sorted(inner.state[parameter])


def distance(left, right):
    return (left - right).abs().max().item()


is_as_described = True
for optimizer_class, options in (
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.AdamW, {}),
    (AdaBelief, {}),
    (Lion, {}),
):
    none, _ = train(optimizer_class, options, "none")
    reset, names = train(optimizer_class, options, "reset")
    pullback, _ = train(optimizer_class, options, "pullback")
    by_hand, _ = train(optimizer_class, options, "none", resets_itself=True)
    print(f"{optimizer_class.__name__}: after 12 steps parameters differ from those of 'none'")
    print(f"    by {distance(none, reset):.4f} with 'reset',", end=" ")
    print(f"{distance(none, pullback):.4f}", end=" ")
    print(f"with 'pullback', {distance(none, by_hand):.4f} with a reset by hand; state {names}")
    is_as_described &= distance(none, by_hand) > 0.01
    if optimizer_class is torch.optim.SGD:
        is_as_described &= distance(reset, by_hand) < 1e-6 and distance(none, pullback) > 0.01
    else:
        is_as_described &= distance(none, reset) == distance(none, pullback) == 0
        is_as_described &= "momentum_buffer" in names
sys.exit(0 if is_as_described else "Lookahead resets the momentum of Adam and others")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
