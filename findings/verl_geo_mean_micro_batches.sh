#!/usr/bin/env bash
# verl 0.9.1: losses of the micro-batches of a mini-batch are added up, and each is normalized by
# numbers of the whole batch, config.global_batch_info. The policy loss "geo_mean" (GMPO) takes the
# mean over its micro-batch instead. So with N micro-batches loss and gradient are N times as large,
# and an entropy or KL term beside it counts N times less. No error, no warning; "vanilla", "gspo"
# and "cispo" are the same for any number of micro-batches.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 verl==0.9.1
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys

import torch

logging.disable(logging.WARNING)

from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

torch.set_num_threads(1)
ROWS, LENGTH = 8, 6
torch.manual_seed(0)
logits = torch.randn(ROWS, LENGTH, 10, dtype=torch.float64)
ids = torch.randint(0, 10, (ROWS, LENGTH, 1))
old_log_prob = logits.log_softmax(-1).gather(-1, ids)[..., 0] + 0.05 * torch.randn(ROWS, LENGTH)
advantages = torch.randn(ROWS, 1, dtype=torch.float64).expand(ROWS, LENGTH)
mask = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (ROWS, 1))


def loss_and_gradient(loss_mode, micro_batches):
    """Return the sum of the micro-batches' losses, and its gradient."""
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="seq-mean-token-mean",
    )
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=mask.sum(), global_batch_size=ROWS, loss_scale_factor=None
    )
    leaf = logits.clone().requires_grad_()
    total = 0.0
    for rows in torch.arange(ROWS).chunk(micro_batches):
        loss, _ = get_policy_loss_fn(loss_mode)(
            old_log_prob=old_log_prob[rows],
            log_prob=leaf[rows].log_softmax(-1).gather(-1, ids[rows])[..., 0],
            advantages=advantages[rows],
            response_mask=mask[rows],
            loss_agg_mode=config.loss_agg_mode,
            config=config,
        )
        loss.backward()
        total += loss.item()
    return total, leaf.grad


is_as_described = True
for loss_mode in ("vanilla", "gspo", "cispo", "geo_mean"):
    expected, gradient = loss_and_gradient(loss_mode, 1)
    for micro_batches in (1, 2, 8):
        total, accumulated = loss_and_gradient(loss_mode, micro_batches)
        times = (accumulated.norm() / gradient.norm()).item()
        print(f"{loss_mode}, micro-batches: {micro_batches}, loss {total:.4f},", end=" ")
        print(f"gradient {times:.3f} times that of the whole batch")
        factor = micro_batches if loss_mode == "geo_mean" else 1
        is_as_described &= torch.allclose(accumulated, factor * gradient)
        is_as_described &= abs(total - factor * expected) < 1e-6
sys.exit(0 if is_as_described else "geo_mean no longer grows with the number of micro-batches")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
