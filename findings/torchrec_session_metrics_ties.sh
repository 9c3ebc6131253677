#!/usr/bin/env bash
# torchrec 1.8.0: in RecallSessionMetric and PrecisionSessionMetric all equal predictions of a
# session get the best of their ranks, so that more than top_threshold of them count as positive. A
# model that predicts the same for everything has a recall of 1, whatever top_threshold is. The
# example in ranking_within_session gives each a rank of its own (0 and 1 for the two 1.0, 5 and 6
# for the two 0.0 of a session), as top_threshold needs them, but the function does not return what
# it shows. No error, no warning; without equal predictions both are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 \
  fbgemm-gpu-cpu==1.8.0 tensordict==0.15.3 torchmetrics==1.0.3 pyre-extensions==0.0.32
# torchrec itself asks for fbgemm-gpu, with CUDA, which does not go with the one for the CPU
"$folder/venv/bin/pip" install --quiet --no-deps torchrec==1.8.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

warnings.filterwarnings("ignore")
logging.disable()

import torch
from torchrec.metrics.metrics_config import RecTaskInfo, SessionMetricDef
from torchrec.metrics.precision_session import PrecisionSessionMetric
from torchrec.metrics.recall_session import RecallSessionMetric, ranking_within_session

# the example of the docstring of ranking_within_session
predictions = torch.tensor([1, 0, 0.51, 0.8, 1, 0, 0.51, 0.8, 1, 0, 0.51, 0.8])
sessions = torch.tensor([1] * 7 + [-1] * 5)
shown = [0, 5, 3, 2, 1, 6, 4, 1, 0, 4, 3, 2]
ranks = ranking_within_session(predictions[None], sessions[None]).tolist()
print(f"ranks in the docstring {shown}")
print(f"ranks computed         {ranks}")


def measure(cls, scores, labels):
    """Return the metric of one session of the scores, of which the best two count as positive."""
    task = RecTaskInfo(
        name="task",
        label_name="label",
        prediction_name="prediction",
        weight_name="weight",
        session_metric_def=SessionMetricDef(session_var_name="session", top_threshold=2),
    )
    metric = cls(world_size=1, my_rank=0, batch_size=len(scores), tasks=[task])
    metric.update(
        predictions={"task": torch.tensor(scores).double()},
        labels={"task": torch.tensor(labels).double()},
        weights={"task": torch.ones(len(scores)).double()},
        required_inputs={"session": torch.zeros(len(scores)).double()},
    )
    values = metric.compute()
    return next(value.item() for key, value in values.items() if "lifetime" in key)


labels = [0, 0, 0, 0, 0, 0, 1, 1]
seen = {}
for name, scores in (
    ("different scores, best two wrong", [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
    ("different scores, best two right", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]),
    ("the same score for all eight", [0.5] * 8),
):
    recall = measure(RecallSessionMetric, scores, labels)
    precision = measure(PrecisionSessionMetric, scores, labels)
    seen[name] = (recall, precision)
    print(f"{name}: recall of the best two {recall}, precision {precision}")
is_as_described = ranks == [0, 5, 3, 2, 0, 5, 3, 1, 0, 4, 3, 1] and ranks != shown
is_as_described &= list(seen.values()) == [(0, 0), (1, 1), (1, 0.25)]
sys.exit(0 if is_as_described else "equal predictions have ranks of their own")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
