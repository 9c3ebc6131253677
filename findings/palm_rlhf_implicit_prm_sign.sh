#!/usr/bin/env bash
# palm-rlhf-pytorch 0.8.0: ImplicitPRM (arXiv 2412.01981) returns for labels "the cross entropy
# formulation from their paper", but without its minus: the logarithm of the likelihood. Who
# minimizes it, as the file's example does with loss.backward(), teaches it the opposite: rewards of
# right answers sink, those of wrong ones rise. No error, no warning; the loss is below 0 and sinks.
# It is exactly the negative of torch's binary_cross_entropy_with_logits of the same rewards.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 palm-rlhf-pytorch==0.8.0 \
    accelerate==1.15.0 adam-atan2-pytorch==0.4.1 hl-gauss-pytorch==0.3.0
cat > "$folder/program.py" <<'PROGRAM'
import math
import sys
import warnings

import torch
import torch.nn.functional as F
from palm_rlhf_pytorch import ImplicitPRM, PaLM

warnings.simplefilter("ignore")
torch.set_num_threads(1)
is_as_described = True
for sign in (1, -1):
    torch.manual_seed(0)
    model = ImplicitPRM(PaLM(num_tokens=32, dim=32, depth=1, heads=2, dim_head=16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    answers = torch.randint(32, (16, 12))
    is_right = torch.arange(16) % 2
    print(f"minimizing {'the loss' if sign == 1 else 'its negative'}")
    for step in range(101):
        loss = model(answers, is_right)
        if step % 50 == 0:
            with torch.no_grad():
                rewards = model(answers)
            of_right, of_wrong = (rewards[is_right == label].mean().item() for label in (1, 0))
            labels = is_right[:, None].expand_as(rewards).float()
            expected = F.binary_cross_entropy_with_logits(rewards, labels).item()
            print(f"    step {step}: loss {loss.item():.4f}, expected {expected:.4f};", end=" ")
            print(f"mean reward of right answers {of_right:.3f}, of wrong ones {of_wrong:.3f}")
            is_as_described &= math.isclose(loss.item(), -expected, rel_tol=1e-4)
        optimizer.zero_grad()
        (sign * loss).backward()
        optimizer.step()
    is_as_described &= sign * of_right < -0.1 and sign * of_wrong > 0.1
sys.exit(0 if is_as_described else "minimizing the loss now raises rewards of right answers")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
