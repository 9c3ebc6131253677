#!/usr/bin/env bash
# seqeval 1.2.2: precision_score, recall_score, f1_score and classification_report take
# sample_weight ("Sample weights, array-like of shape (n_samples,)") and leave it out of every
# score, in the default mode and in the strict one, for each kind of average. A sentence of weight 0
# counts as any other. No error, no warning, not even for weights of another length.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.3.5 scikit-learn==1.9.1 seqeval==1.2.2
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

from seqeval.metrics import f1_score
from seqeval.scheme import IOB2
from sklearn.metrics import f1_score as f1_score_of_labels

warnings.simplefilter("ignore")
true = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "O", "B-PER"]]
predicted = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC", "O"]]  # one right, one wrong

is_as_described = True
for average in ("micro", "macro", "weighted"):
    for options in ({}, {"mode": "strict", "scheme": IOB2}):
        scores = {}
        for weights in (None, (1, 0), (0, 1), (1000, 1)):
            scores[weights] = float(
                f1_score(true, predicted, average=average, sample_weight=weights, **options)
            )
        numbers = ", ".join(f"{weights}: {score:.3f}" for weights, score in scores.items())
        print(f"{average:8} {'strict' if options else 'default':7} F1 by sample_weight, {numbers}")
        is_as_described &= len(set(scores.values())) == 1 and 0.4 < scores[None] < 0.6
print("without the other sentence:")
for index in range(2):
    score = f1_score(true[index : index + 1], predicted[index : index + 1])
    print(f"    sentence {index} alone: {score:.3f}")
    is_as_described &= score == 1 - index
labels, guesses = ["PER", "LOC"], ["PER", "PER"]
print("scikit-learn's F1 of two labels, one right, by sample_weight:", end=" ")
for weights in ((1, 1), (1, 0), (0, 1)):
    score = f1_score_of_labels(labels, guesses, average="micro", sample_weight=weights)
    print(f"{weights}: {score:.1f}", end=" ")
print()
sys.exit(0 if is_as_described else "sample_weight now weighs sentences")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
