#!/usr/bin/env bash
# torchmetrics 1.9.0: Perplexity takes the softmax of the logits in their own type and then its
# logarithm. In fp16 a token of less probability than 3e-8 so has 0, and one such token makes the
# perplexity of the whole text infinite, also of what is added later. In fp32 it is so below 1e-45.
# No error, no warning. torch's cross_entropy of the same fp16 logits is finite and right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchmetrics==1.9.0
cat > "$folder/program.py" <<'PROGRAM'
import math
import sys

import torch
from torchmetrics.text import Perplexity

torch.manual_seed(0)
batches, rows, length, vocab_size = 4, 4, 128, 1000


def texts(surprise):
    """Return logits and ids of a model that is sure of each token, and wrong once, in batch 2."""
    logits = torch.randn(batches, rows, length, vocab_size)
    ids = torch.randint(vocab_size, (batches, rows, length))
    logits.scatter_(-1, ids[..., None], 12.0)
    logits[1, 0, 5, ids[1, 0, 5]] = 12.0 - surprise
    logits[1, 0, 5, (ids[1, 0, 5] + 1) % vocab_size] = 12.0
    return logits, ids


is_as_described = True
for surprise, dtype, is_infinite in (
    (15, torch.float32, False),
    (15, torch.float16, False),
    (20, torch.float32, False),
    (20, torch.float16, True),
    (120, torch.float32, True),
):
    logits, ids = texts(surprise)
    logits = logits.to(dtype)
    metric = Perplexity()
    after = []
    for batch_logits, batch_ids in zip(logits, ids, strict=True):
        metric.update(batch_logits, batch_ids)
        after.append(metric.compute().item())
    losses = torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), ids.view(-1))
    exact = torch.nn.functional.cross_entropy(logits.double().view(-1, vocab_size), ids.view(-1))
    expected = exact.exp().item()
    print(f"{dtype}, one token of {ids.numel()} has a loss of about {surprise}")
    print("    Perplexity after each batch:  ", ", ".join(f"{value:.4f}" for value in after))
    print(f"    exp of the loss in this type: {losses.float().exp():.4f}; in fp64: {expected:.4f}")
    is_as_described &= math.isclose(losses.float().exp().item(), expected, rel_tol=5e-3)
    if is_infinite:
        is_as_described &= math.isfinite(after[0]) and after[1:] == [math.inf] * 3
    else:
        is_as_described &= math.isclose(after[-1], expected, rel_tol=5e-3)
sys.exit(0 if is_as_described else "one token no longer makes the perplexity infinite")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
