#!/usr/bin/env bash
# torch 2.13.0: F.cross_entropy of fp16 logits with label_smoothing and class indices adds the log
# probabilities of all classes, and of all tokens for "mean" and "sum", before it divides. So with
# 50000 classes the loss of every token is inf, with 1000 the mean of a batch of 64, though they are
# about 11 and 7; what looks at the loss, as a check for divergence, is misled. No error, no
# warning; the gradients are right, and so are the losses without smoothing, and those of class
# probabilities with it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import math
import sys

import torch
import torch.nn.functional as F

torch.manual_seed(0)
is_as_described = True
for tokens, classes, reduction in ((3, 50_000, "none"), (3, 50_000, "mean"), (64, 1000, "mean")):
    logits = torch.randn(tokens, classes).half().requires_grad_()
    exact_logits = logits.detach().double().requires_grad_()
    labels = torch.randint(classes, (tokens,))
    probabilities = F.one_hot(labels, classes).half()
    options = {"label_smoothing": 0.1, "reduction": reduction}
    smoothed = F.cross_entropy(logits, labels, **options)
    exact = F.cross_entropy(exact_logits, labels, **options)
    plain = F.cross_entropy(logits, labels, reduction=reduction)
    of_probabilities = F.cross_entropy(logits, probabilities, **options)
    (gradient,) = torch.autograd.grad(smoothed.sum(), logits)
    (exact_gradient,) = torch.autograd.grad(exact.sum(), exact_logits)
    error = ((gradient - exact_gradient).norm() / exact_gradient.norm()).item()
    print(f"{tokens} tokens, {classes} classes, fp16, reduction {reduction!r}")
    print(f"    with smoothing        {smoothed.tolist()}")
    print(f"    right                 {exact.tolist()}")
    print(f"    of probabilities      {of_probabilities.tolist()}")
    print(f"    without smoothing     {plain.tolist()}")
    print(f"    error of the gradient {error:.2%}")
    is_as_described &= all(math.isinf(loss) for loss in smoothed.flatten().tolist())
    is_as_described &= torch.allclose(of_probabilities.double(), exact, rtol=1e-2)
    is_as_described &= bool(plain.isfinite().all()) and error < 0.01
sys.exit(0 if is_as_described else "cross_entropy with label_smoothing no longer overflows so")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
