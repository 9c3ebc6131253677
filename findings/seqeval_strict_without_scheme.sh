#!/usr/bin/env bash
# seqeval 1.2.2: precision_score, recall_score and f1_score with mode="strict" but without a scheme
# (which is optional) score leniently, as without the mode. Of the mode their docstrings say that
# the score "is calculated strictly". classification_report with the same arguments finds out the
# scheme by itself and is strict, so F1 is 0.00 in its table and 1.00 by f1_score. No error, no
# warning about it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.3.5 scikit-learn==1.9.1 seqeval==1.2.2
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

from seqeval.metrics import classification_report, f1_score, precision_score, recall_score
from seqeval.scheme import IOB2

warnings.simplefilter("ignore")  # about scores without a prediction
true = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "O", "B-PER"]]
predicted = [["I-PER", "I-PER", "O", "I-LOC"], ["I-LOC", "O", "I-PER"]]  # in IOB2 no entity at all

found = {}
for name, options in (
    ("default", {}),
    ("strict", {"mode": "strict"}),
    ("strict, IOB2", {"mode": "strict", "scheme": IOB2}),
):
    functions = (precision_score, recall_score, f1_score)
    scores = [function(true, predicted, **options) for function in functions]
    report = classification_report(true, predicted, output_dict=True, **options)
    average = report["micro avg"]
    in_report = [average[key] for key in ("precision", "recall", "f1-score")]
    found[name] = [float(score) for score in scores], [float(score) for score in in_report]
    print(f"{name:12}: precision, recall, F1 are", *(f"{score:.2f}" for score in scores), end="; ")
    print("in the report", *(f"{score:.2f}" for score in in_report))
perfect, none = [1.0] * 3, [0.0] * 3
is_as_described = found["default"] == (perfect, perfect)
is_as_described &= found["strict"] == (perfect, none)
is_as_described &= found["strict, IOB2"] == (none, none)
sys.exit(0 if is_as_described else "strict scores without a scheme are now strict")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
