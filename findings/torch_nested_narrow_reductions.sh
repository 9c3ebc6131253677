#!/usr/bin/env bash
# torch 2.13.0: torch.nested.narrow makes a nested tensor (layout=torch.jagged) of a padded batch
# and its lengths, as a view. sum(), mean(), max(), argmax(), prod() and any() of it over all
# elements count the padding too, as does F.l1_loss. So a mean loss depends on what padding holds
# and how long it is, and padding gets the same gradient as the rest. No error, no warning; its
# elements are those without padding, and of a copy without it, contiguous(), all results are
# right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F

lengths = torch.tensor([2, 4, 3])
padded = torch.full((3, 6, 1), 9.0)  # of 9, with padding
for row, length in enumerate(lengths.tolist()):
    padded[row, :length, 0] = torch.arange(length) * 0.5 - 1.25
tokens = torch.cat([row[:length] for row, length in zip(padded, lengths)])


def nested_of(batch):
    return torch.nested.narrow(batch, 1, 0, lengths, layout=torch.jagged)


reductions = {
    "sum()": lambda x: x.sum(),
    "mean()": lambda x: x.mean(),
    "max()": lambda x: x.max(),
    "argmax()": lambda x: x.argmax(),
    "prod()": lambda x: x.prod(),
    "(x > 8).any()": lambda x: (x > 8).any(),
    "l1_loss(x, 2 x)": lambda x: F.l1_loss(x, 2 * x),
}
nested = nested_of(padded)
print("elements of the nested tensor:", [row.flatten().tolist() for row in nested.unbind()])
elements = torch.cat(list(nested.unbind()))
is_as_described = torch.equal(elements, tokens)
for name, reduction in reductions.items():
    by_view, by_copy, right, with_padding = (
        reduction(x).item() for x in (nested, nested.contiguous(), tokens, padded)
    )
    print(f"    {name:15} {by_view:10.4g}, of contiguous() {by_copy:8.4g}, right {right:8.4g}")
    is_as_described &= by_copy == right != by_view == with_padding
padded.requires_grad_()
nested_of(padded).mean().backward()
rounded = [[round(value, 3) for value in row] for row in padded.grad.flatten(1).tolist()]
print("gradient of mean():", rounded)
is_as_described &= torch.allclose(padded.grad, torch.tensor(1 / len(tokens)))
sys.exit(0 if is_as_described else "reductions of a narrowed nested tensor have changed")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
