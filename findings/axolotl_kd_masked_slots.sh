#!/usr/bin/env bash
# axolotl 0.19.0: with kd_normalize_topk the loss of its KD trainer normalizes the student over all
# slots of a token's top-k, also those that target_mask leaves out, whose id is 0. So a row that has
# fewer of the teacher's log-probabilities than the longest of the batch, which its collator pads
# so, gets another loss and gradient, with one for the logit of id 0: a student that equals the
# teacher has a loss. The same rows alone are right, as is all without kd_normalize_topk.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# all that axolotl asks for would be gigabytes; of its pinned versions, the loss imports these
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.16.1 \
    peft==0.20.0 accelerate==1.13.0 liger-kernel==0.8.1 pydantic==2.12.5 addict==2.4.0
"$folder/venv/bin/pip" install --quiet --no-deps axolotl==0.19.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from axolotl.integrations.kd.kernels import LigerFusedLinearKLTopKLogprobLoss

length, vocab_size, top = 5, 32, 3
torch.manual_seed(0)
weight = torch.eye(vocab_size)  # hidden states are logits, so that gradients are of logits
logits = torch.randn(1, length, vocab_size)
labels = torch.randint(vocab_size, (1, length))
ids = logits[..., 1:].topk(top).indices + 1
teacher = logits.gather(-1, ids).log_softmax(-1)  # what the student has, too
mask = torch.ones(1, length, top)


def padded(values, value):
    """Return the values with a fourth slot that its mask leaves out."""
    return torch.cat([values, torch.full((1, length, 1), value, dtype=values.dtype)], -1)


def run(normalizes, is_padded):
    loss_fn = LigerFusedLinearKLTopKLogprobLoss(
        0.0, 1.0, 1.0, beta=0.0, compiled=False, normalize_topk=normalizes
    )
    targets = (ids, teacher, mask)
    if is_padded:
        targets = (padded(ids, 0), padded(teacher, -1e9), padded(mask, 0))
    states = logits.clone().requires_grad_()
    loss = loss_fn(weight, states, *targets, labels)
    loss.backward()
    return loss.item(), states.grad


is_as_described = True
for normalizes in (False, True):
    loss, gradient = run(normalizes, False)
    loss_padded, gradient_padded = run(normalizes, True)
    apart = (gradient - gradient_padded).abs().max().item()
    of_zero = gradient_padded[..., 0].abs().max().item()
    print(f"kd_normalize_topk: {normalizes}; student and teacher are equal")
    print(f"    {top} slots a token:               loss {loss:.6f}")
    print(f"    and a fourth that is masked:   loss {loss_padded:.6f}, gradient {apart:.6f} off")
    if normalizes:
        print(f"    of the logit of id 0: up to {of_zero:.6f}")
        is_as_described &= abs(loss) < 1e-5 and bool(gradient.abs().max() < 1e-5)
        is_as_described &= loss_padded > 0.1 and apart > 0.01 and of_zero > 0.01
    else:
        is_as_described &= abs(loss - loss_padded) < 1e-5 and apart < 1e-5
sys.exit(0 if is_as_described else "masked slots no longer count for the student")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
