#!/usr/bin/env bash
# torchopt 0.7.3: meta-gradients through MetaAdam and MetaAdamW with use_accelerated_op=True leave
# out eps, and confuse eps_root, which is there to make these gradients stable: they can have the
# opposite sign. Parameters are the same, and without the accelerated operation meta-gradients are
# those of finite differences. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchopt==0.7.3
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torchopt

torch.manual_seed(0)
inputs = torch.randn(5, 4, dtype=torch.float64)
targets = torch.randn(5, 3, dtype=torch.float64)


def outer_loss(kind, scale, steps, **options):
    """Train on scaled targets, and return the loss on the real ones."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 3).double()
    optimizer = kind(model, lr=0.1, **options)
    for _ in range(steps):
        optimizer.step(((model(inputs) - scale * targets) ** 2).mean())
    return ((model(inputs) - targets) ** 2).mean()


def tensor(number):
    return torch.tensor(number, dtype=torch.float64, requires_grad=True)


def meta_gradient(*arguments, **options):
    scale = tensor(1.3)
    loss = outer_loss(arguments[0], scale, *arguments[1:], **options)
    return loss.item(), torch.autograd.grad(loss, scale)[0].item()


def finite_difference(*arguments, **options):
    losses = []
    for number in (1.3 + 1e-5, 1.3 - 1e-5):
        loss = outer_loss(arguments[0], tensor(number), *arguments[1:], **options)
        losses.append(loss.item())
    return (losses[0] - losses[1]) / 2e-5


wrong, is_as_described = 0, True
print("gradient of the loss after some steps by a scale of their targets:")
for kind in (torchopt.MetaAdam, torchopt.MetaAdamW):
    for eps, eps_root in ((1e-8, 0.0), (0.1, 0.0), (1e-8, 1e-3)):
        for steps in (1, 3):
            options = {"eps": eps, "eps_root": eps_root}
            loss, plain = meta_gradient(kind, steps, **options)
            options["use_accelerated_op"] = True
            accelerated_loss, accelerated = meta_gradient(kind, steps, **options)
            expected = finite_difference(kind, steps, **options)
            print(f"    {kind.__name__:9} eps={eps:g}, eps_root={eps_root:g},", end=" ")
            print(f"{steps} steps: {accelerated:8.5f},", end=" ")
            print(f"without the operation {plain:8.5f}, by finite differences {expected:8.5f}")
            is_as_described &= abs(loss - accelerated_loss) < 1e-12
            is_as_described &= abs(plain - expected) < 1e-6
            error = abs(accelerated - expected)
            is_default = eps == 1e-8 and eps_root == 0
            is_as_described &= error < 1e-5 if is_default else error > 1e-3
            wrong += accelerated * expected < 0 and error > 1e-3
is_as_described &= wrong > 0
sys.exit(0 if is_as_described else "accelerated meta-gradients are now right")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
