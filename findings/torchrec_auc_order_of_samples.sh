#!/usr/bin/env bash
# torchrec 1.8.0: AUCMetric takes equal predictions in the order of a sort, not even a stable one,
# so that an AUC with many of them depends on the order of samples. A model that predicts the same
# for everything has 0.0 or 1.0 if all positive samples come first or last, where it is 0.5 by
# definition, and predictions rounded to a few values have one that is far from scikit-learn's.
# AUPRCMetric, of the same library, has one point for each prediction, and does not depend on the
# order. No error, no warning; without equal predictions AUC is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 scikit-learn==1.7.2 \
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
from sklearn.metrics import roc_auc_score
from torchrec.metrics.auc import AUCMetric
from torchrec.metrics.auprc import AUPRCMetric
from torchrec.metrics.metrics_config import RecTaskInfo

task = RecTaskInfo(
    name="task", label_name="label", prediction_name="prediction", weight_name="weight"
)


def measure(cls, scores, labels):
    metric = cls(world_size=1, my_rank=0, batch_size=len(scores), tasks=[task], window_size=1000)
    weights = torch.ones(len(scores)).double()
    metric.update(predictions={"task": scores}, labels={"task": labels}, weights={"task": weights})
    return next(iter(metric.compute().values())).item()


generator = torch.Generator().manual_seed(0)
labels = torch.tensor([0.0, 1.0]).repeat(500).double()
scores = torch.rand(1000, generator=generator).double() + 0.1 * labels
seen = {}
for name, given in (
    ("different scores", scores),
    ("scores rounded to halves", (2 * scores).round() / 2),
    ("the same score", torch.full_like(scores, 0.5)),
):
    print(f"{name}, scikit-learn: AUC {roc_auc_score(labels, given):.4f}")
    seen[name] = []
    for order, descending in (("positive samples first", True), ("positive samples last", False)):
        indices = labels.argsort(descending=descending, stable=True)
        auc = measure(AUCMetric, given[indices], labels[indices])
        auprc = measure(AUPRCMetric, given[indices], labels[indices])
        seen[name].append((auc, auprc))
        print(f"    {order}: AUC {auc:.4f}, AUPRC {auprc:.4f}")
is_as_described = True
for name, ((auc, auprc), (other_auc, other_auprc)) in seen.items():
    is_as_described &= abs(auprc - other_auprc) < 1e-6
    if name == "different scores":
        is_as_described &= abs(auc - other_auc) < 1e-6
        is_as_described &= abs(auc - roc_auc_score(labels, scores)) < 1e-6
    else:
        is_as_described &= abs(auc - other_auc) > 0.2
is_as_described &= {auc for auc, auprc in seen["the same score"]} == {0, 1}
sys.exit(0 if is_as_described else "AUC does not depend on the order of samples")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
