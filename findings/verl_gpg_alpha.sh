#!/usr/bin/env bash
# verl 0.9.1: the advantage estimator "gpg", documented as that of Group Policy Gradient
# (2504.02546), multiplies advantages by alpha = B / (B - M) there, M being the samples of groups
# whose rewards are all the same, so that these leave no trace. verl takes B / (number of rewards
# that are not 0) instead. So the same advantages, of answers of which one in eight is right, are 8
# times too large, with rewards of 1 and 0; with 1 and -1 alpha is always 1, and groups that are
# all right or all wrong weaken the gradient, as what alpha is to correct. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 verl==0.9.1
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys

import numpy as np
import torch

logging.disable(logging.WARNING)

from verl.trainer.ppo.core_algos import get_adv_estimator_fn

gpg = get_adv_estimator_fn("gpg")
GROUP = 8


def factors(groups, wrong):
    """Return what centered rewards are multiplied by, by verl and by the paper."""
    rewards = torch.tensor(
        [[1.0] * right + [wrong] * (GROUP - right) for right in groups], dtype=torch.float64
    )
    index = np.repeat(np.arange(len(groups)), GROUP)
    token_rewards = rewards.reshape(-1, 1).clone()
    advantages, _ = gpg(token_rewards, torch.ones_like(token_rewards), index)
    centered = (rewards - rewards.mean(1, keepdim=True)).reshape(-1)
    differs = centered != 0
    by_verl = (advantages[differs, 0] / centered[differs]).unique()
    assert len(by_verl) == 1
    return by_verl.item(), (rewards.numel() / differs.sum()).item()


is_as_described = True
for name, groups in (
    ("1 of 8 right in each group", (1, 1, 1, 1)),
    ("7 of 8 right in each group", (7, 7, 7, 7)),
    ("4 of 8 right, 4, all and all", (4, 4, 8, 8)),
    ("4 of 8 right, 4, none and none", (4, 4, 0, 0)),
):
    for wrong in (0.0, -1.0):
        by_verl, by_paper = factors(groups, wrong)
        print(f"{name}, rewards 1 and {wrong:g}: alpha {by_verl:.3f}, by the paper {by_paper:.3f}")
        described = 1.0 if wrong else len(groups) * GROUP / sum(groups)
        is_as_described &= abs(by_verl - described) < 1e-5
        is_as_described &= by_paper == (1.0 if groups[2] in (1, 7) else 2.0)
sys.exit(0 if is_as_described else "alpha is no longer made of the rewards that are not 0")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
