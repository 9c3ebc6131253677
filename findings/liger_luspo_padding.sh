#!/usr/bin/env bash
# liger-kernel 0.8.5: LigerFusedLinearGRPOLoss with loss_type="luspo" and a loss per token (that is
# with its default importance_sampling_level="token", or with a beta that is not 0, its default too)
# adds the positions that attention_mask leaves out to those of the completions. So the loss depends
# on what padding holds, and padding gets a gradient. No error, no warning; other types are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 liger-kernel==0.8.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

batch, length, hidden_size, vocab_size = 4, 8, 16, 64
torch.manual_seed(0)
weight = torch.randn(vocab_size, hidden_size)
ids = torch.randint(vocab_size, (batch, length))
advantages = torch.tensor([1.0, -0.5, 0.5, -1.0])
mask = torch.arange(length) < torch.tensor([8, 6, 3, 5])[:, None]  # completions, then padding
first = torch.randn(batch, length, hidden_size)
noise = 0.1 * torch.randn(batch, length, hidden_size)
second = torch.where(mask[..., None], first, first + noise)


def log_probabilities(hidden):
    logits = hidden @ weight.T
    return torch.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1)


old = log_probabilities(first) + 0.1 * torch.randn(batch, length)
reference = log_probabilities(first) + 0.1 * torch.randn(batch, length)


def liger(hidden, **options):
    """Return the loss, and how large the gradient is at the positions of padding."""
    hidden = hidden.clone().requires_grad_()
    loss_fn = LigerFusedLinearGRPOLoss(compiled=False, max_completion_length=length, **options)
    loss, _ = loss_fn(
        hidden, weight, ids, mask.float(), advantages, ref_per_token_logps=reference,
        old_per_token_logps=old,
    )
    loss.backward()
    return loss.item(), hidden.grad[~mask].abs().max().item()


def luspo(level, beta):
    """Return the mean over sequences of the sum over their completions' tokens, in fp64."""
    here = log_probabilities(first).double()
    losses = []
    for i, is_kept in enumerate(mask):
        ratio = (here - old)[i, is_kept]
        coefficient = (ratio.mean() if level == "sequence" else ratio).exp()
        token = -torch.min(coefficient * advantages[i], coefficient.clamp(0.8, 1.2) * advantages[i])
        difference = (reference - here)[i, is_kept]
        losses.append((token + beta * (difference.exp() - difference - 1)).sum())
    return torch.stack(losses).mean().item()


is_as_described = True
for loss_type, level, beta, is_right in (
    ("dapo", "token", 0.04, True),
    ("grpo", "token", 0.04, True),
    ("luspo", "sequence", 0.0, True),
    ("luspo", "sequence", 0.04, False),
    ("luspo", "token", 0.0, False),
    ("luspo", "token", 0.04, False),
):
    options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": beta}
    loss, gradient = liger(first, **options)
    other, _ = liger(second, **options)
    print(f"{loss_type}, importance_sampling_level={level!r}, beta={beta}")
    print(f"    loss {loss:.6f}, with other numbers in the padding {other:.6f};")
    print(f"    gradient of the padding at most {gradient:.6f}")
    if loss_type == "luspo":
        expected = luspo(level, beta)
        print(f"    loss of the completions alone, fp64: {expected:.6f}")
        is_as_described &= (abs(loss - expected) < 1e-5) == is_right
    if is_right:
        is_as_described &= loss == other and gradient == 0
    else:
        is_as_described &= abs(loss - other) > 1e-3 and gradient > 1e-4
sys.exit(0 if is_as_described else "padding no longer counts in luspo")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
