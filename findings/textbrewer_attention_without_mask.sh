#!/usr/bin/env bash
# textbrewer 0.2.1.post1: the losses on attention matrices (attention_mse, attention_mse_sum,
# attention_ce, attention_ce_mean) leave out all attention scores below -0.001 if the adaptor
# returns no inputs_mask. Their docstrings only say that a mask leaves out positions where it is 0,
# and attention_ce takes scores before the softmax, where a constant makes no difference. With a
# mask of ones the loss is another one, that of all scores; without it attention_mse has no gradient
# at negative scores, and attention_ce falls to 0 if 5 is subtracted from the scores. No error, no
# warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 textbrewer==0.2.1.post1
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings
from importlib.metadata import version

import torch
import torch.nn.functional as F

warnings.simplefilter("ignore")
from textbrewer.presets import MATCH_LOSS_MAP  # noqa: E402

print("torch", torch.__version__, "textbrewer", version("textbrewer"))
torch.manual_seed(0)
student, teacher = torch.randn(2, 2, 3, 5, 5)  # batch, heads, length, length
ones = torch.ones(2, 5)


def by_hand(name, student, teacher):
    """Return the loss of all scores."""
    if name == "attention_mse":
        return F.mse_loss(student, teacher)
    if name == "attention_mse_sum":
        return F.mse_loss(student.sum(1), teacher.sum(1))
    if name == "attention_ce_mean":
        student, teacher = student.mean(1), teacher.mean(1)
    return -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1).mean()


is_as_described = True
for name in ("attention_mse", "attention_mse_sum", "attention_ce", "attention_ce_mean"):
    loss = MATCH_LOSS_MAP[name]
    without, masked = loss(student, teacher).item(), loss(student, teacher, mask=ones).item()
    expected = by_hand(name, student, teacher).item()
    print(f"{name:17} no mask {without:.4f}, mask of ones {masked:.4f}, by hand {expected:.4f}")
    is_as_described &= abs(masked - expected) < 1e-5 and without < 0.8 * expected
for shift in (0, -1, -5):
    loss = MATCH_LOSS_MAP["attention_ce"]
    without = loss(student + shift, teacher + shift).item()
    masked = loss(student + shift, teacher + shift, mask=ones).item()
    print(f"attention_ce of scores {shift:+}: no mask {without:.4f}, mask of ones {masked:.4f}")
    is_as_described &= abs(masked - by_hand("attention_ce", student, teacher).item()) < 1e-5
is_as_described &= without == 0
scores = student.clone().requires_grad_()
MATCH_LOSS_MAP["attention_mse"](scores, teacher).backward()
is_negative = student < -1e-3
is_zero = scores.grad == 0
print(f"attention_mse: gradient is 0 at {is_zero[is_negative].float().mean():.0%}", end=" ")
print(f"of the negative scores, at {is_zero[~is_negative].float().mean():.0%} of others")
is_as_described &= is_zero.equal(is_negative)
sys.exit(0 if is_as_described else "negative scores now count without a mask")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
