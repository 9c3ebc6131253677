#!/usr/bin/env bash
# ai2-olmo-core 3.0.0: with loss_reduction="none" LMHead, and cross_entropy_loss with
# reduction="none", take the z-loss of positions whose label is ignore_index too. So their loss is
# not 0, and they get a gradient, though ignore_index "does not contribute to the input gradient".
# With "sum" and "mean" the same functions leave these positions out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 ai2-olmo-core==3.0.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from olmo_core.nn.lm_head import LMHeadConfig

torch.manual_seed(0)
batch, length, hidden_size, vocab_size, multiplier = 2, 5, 16, 64, 1e-2
head = LMHeadConfig().build(d_model=hidden_size, vocab_size=vocab_size)
hidden = torch.randn(batch, length, hidden_size)
labels = torch.randint(vocab_size, (batch, length))
labels[0, 3:] = -100
labels[1, 1] = -100
is_ignored = labels == -100


def loss_and_gradient(reduction):
    inputs = hidden.clone().requires_grad_()
    loss = head(
        inputs, labels=labels, loss_reduction=reduction, z_loss_multiplier=multiplier
    ).loss
    loss.sum().backward()
    return loss.detach(), inputs.grad


def expected():
    """Return the sum over the labels that count of cross-entropy and z-loss, in fp64."""
    logits = head(hidden).detach().double()[~is_ignored]
    log_z = logits.logsumexp(-1)
    chosen = logits.gather(-1, labels[~is_ignored][:, None]).squeeze(-1)
    return (log_z - chosen + multiplier * log_z**2).sum().item()


is_as_described = True
print(f"{is_ignored.sum()} of {labels.numel()} labels ignored, fp64: {expected():.5f} in all")
for reduction in ("sum", "none"):
    loss, gradient = loss_and_gradient(reduction)
    of_ignored = gradient[is_ignored].abs().max().item()
    print(f"{reduction!r}: {loss.sum():.5f} in all, gradient of ignored up to {of_ignored:.5f}")
    if reduction == "none":
        print(f"    loss of the ignored ones {loss[is_ignored].tolist()}")
        of_counted = loss[~is_ignored].sum().item()
        print(f"    loss of the others {of_counted:.5f} in all")
        is_as_described &= abs(of_counted - expected()) < 1e-4
        is_as_described &= of_ignored > 1e-4 and bool((loss[is_ignored] > 0.01).all())
    else:
        is_as_described &= of_ignored == 0 and abs(loss.item() - expected()) < 1e-4
sys.exit(0 if is_as_described else "ignored labels no longer have a z-loss")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
