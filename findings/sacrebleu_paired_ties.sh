#!/usr/bin/env bash
# sacrebleu 2.6.0: paired approximate randomization (--paired-ar) calls two systems significantly
# different that differ in a single sentence, or in none. The README defines the p-value as "roughly
# the probability of the absolute score difference (delta) or higher occurring due to chance", and
# Riezler and Maxwell (2005), whom it cites, count shuffles with at least the real difference; the
# code counts only those with a larger one. If one sentence differs, each shuffle has the real
# difference, so p should be 1 and is 1 / (trials + 1), the smallest possible, for each metric. For
# equal systems, which --paired-bs calls different, too, the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.3.5 sacrebleu==2.6.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import random
import sys

import numpy as np
import sacrebleu
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

logging.disable(logging.CRITICAL)
print("sacrebleu", sacrebleu.__version__)
random.seed(0)
words = "the boat left harbour before dawn while she read one old book about rain and snow".split()
trials = 1000


def with_errors(sentence):
    """Return the sentence with about a third of its words replaced."""
    return " ".join(
        random.choice(words) if random.random() < 0.3 else word for word in sentence.split()
    )


references = [" ".join(random.choices(words, k=12)) for _ in range(200)]
baseline = [with_errors(reference) for reference in references]


def p_value(system, metric, kind):
    """Return sacrebleu's p-value of a system and the baseline."""
    systems = [("baseline", baseline), ("system", system)]
    test = PairedTest(systems, {"metric": metric}, [references], test_type=kind, n_samples=trials)
    _, results = test()
    (of_metric,) = (results[name] for name in results if name != "System")
    return of_metric[1].p_value


def p_value_with_ties(system):
    """Return the share of shuffles whose BLEU differs at least as much as the real outputs'."""
    real = abs(BLEU().corpus_score(system, [references]).score - of_baseline)
    generator = np.random.default_rng(0)
    count = 0
    for _ in range(200):
        is_swapped = generator.integers(2, size=len(system), dtype=bool)
        pairs = zip(baseline, system, is_swapped, strict=True)
        swapped = [(b, a) if swap else (a, b) for a, b, swap in pairs]
        first, second = map(list, zip(*swapped, strict=True))
        scores = [BLEU().corpus_score(output, [references]).score for output in (first, second)]
        count += int(abs(scores[0] - scores[1]) >= real - 1e-9)
    return (count + 1) / 201


of_baseline = BLEU().corpus_score(baseline, [references]).score
is_as_described = True
for different in (0, 1, 2, 10):
    system = [with_errors(reference) for reference in references[:different]]
    system += baseline[different:]
    score = BLEU().corpus_score(system, [references]).score
    bleu, chrf = p_value(system, BLEU(), "ar"), p_value(system, CHRF(), "ar")
    bootstrap, expected = p_value(system, BLEU(), "bs"), p_value_with_ties(system)
    print(f"{different} of {len(system)} sentences differ, BLEU {of_baseline:.3f} and {score:.3f}:")
    print(f"    p by --paired-ar: BLEU {bleu:.4f}, chrF {chrf:.4f}; with ties, BLEU {expected:.4f}")
    print(f"    p by --paired-bs: BLEU {bootstrap:.4f}")
    if different < 2:
        is_as_described &= bleu == chrf == 1 / (trials + 1) and expected == 1
    if different == 0:
        is_as_described &= bootstrap == 1 / (trials + 1)
    if different == 10:
        is_as_described &= bleu > 0.05 and abs(bleu - expected) < 0.1
sys.exit(0 if is_as_described else "ties now count as the README says")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
