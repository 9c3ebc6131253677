#!/usr/bin/env bash
# lm-eval 0.4.13: bleu, chrf and ter take a list of references for each document ("We expect refs to
# be List[str] or List[List[str]], the outer list corresponding to preds", says the code), but only
# count as many of them as the document with the fewest has: zip cuts the others off. One document
# with a single reference makes all others' second and third references ignored, so perfect
# translations of these lose their score. sacrebleu, which lm-eval calls, takes None where a
# document has no further reference, and counts all. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.3.5 sacrebleu==2.6.0
"$folder/venv/bin/pip" install --quiet --no-deps lm-eval==0.4.13
cat > "$folder/program.py" <<'PROGRAM'
import itertools
import sys
from importlib.metadata import version

import sacrebleu
from lm_eval.api.metrics import bleu, chrf, ter

print("lm-eval", version("lm-eval"), "sacrebleu", sacrebleu.__version__)
documents = [  # references and the prediction, which is one of them
    (
        ["The boat left the harbour before dawn.", "Before sunrise the ship sailed out."],
        "Before sunrise the ship sailed out.",
    ),
    (
        ["She has never read that book.", "That is a book she did not read."],
        "That is a book she did not read.",
    ),
]
single = (["Nobody answered the phone all day."], "Nobody answered the phone all day.")


def of_sacrebleu(metric, items):
    """Return sacrebleu's score with all references, None where a document has no more."""
    references = list(itertools.zip_longest(*[references for references, _ in items]))
    return metric([prediction for _, prediction in items], references).score


is_as_described = True
for metric, reference_metric, best in (
    (bleu, sacrebleu.corpus_bleu, 100),
    (chrf, sacrebleu.corpus_chrf, 100),
    (ter, sacrebleu.corpus_ter, 0),
):
    two, three = metric(documents), metric([*documents, single])
    expected = of_sacrebleu(reference_metric, [*documents, single])
    print(f"{metric.__name__:4} of two documents with two references each: {two:6.2f}")
    print(f"     and of a third with one:                    {three:6.2f}")
    print(f"     sacrebleu, all references:                  {expected:6.2f}")
    is_as_described &= abs(two - best) < 1e-6 and abs(expected - best) < 1e-6
    is_as_described &= abs(three - best) > 10
sys.exit(0 if is_as_described else "all references now count")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
