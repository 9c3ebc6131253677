#!/usr/bin/env bash
# composer (mosaicml) 0.32.1: compute_ema(), and the algorithm EMA that calls it, averages integer
# buffers as well, in float32, and rounds the result down. Where smoothing * x + (1 - smoothing) * x
# falls short of x, a buffer that never changes (positions, tables of indices) is off by one after
# the first update, and a counter stands still, so evaluation with the average takes wrong rows.
# torch.optim.swa_utils.AveragedModel with the same average has them right. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.7.0 numpy==2.2.6 mosaicml==0.32.1
cat > "$folder/program.py" <<'PROGRAM'
import copy
import logging
import sys
import warnings

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

warnings.filterwarnings("ignore")
logging.disable()
from composer.algorithms import EMA  # noqa: E402
from composer.functional import compute_ema  # noqa: E402


class Positions(torch.nn.Module):
    """Embeds positions that are in a buffer, as BERT does."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(512, 8)
        self.register_buffer("positions", torch.arange(512))

    def forward(self):
        return self.embedding(self.positions)


is_as_described = True
for half_life in ("10ba", "100ba", "1000ba", "5000ba", "10000ba"):
    smoothing = EMA(half_life=half_life).smoothing
    torch.manual_seed(0)
    model = Positions()
    average = copy.deepcopy(model)
    by_torch = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(smoothing))
    compute_ema(model, average, smoothing=smoothing)
    by_torch.update_parameters(model)
    wrong = (average.positions != model.positions).sum().item()
    is_as_described &= torch.equal(by_torch.module.positions, model.positions)
    is_as_described &= torch.allclose(average.embedding.weight, model.embedding.weight)
    with torch.no_grad():
        distance = (average() - model()).abs().max().item()
    print(f"half life {half_life:>7}: after an update {wrong:3} of 512 positions are off by one,")
    print(f"    outputs by up to {distance:.3f}")
    if half_life == "100ba":
        is_as_described &= wrong > 50 and distance > 1
sys.exit(0 if is_as_described else "integer buffers survive an average")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
