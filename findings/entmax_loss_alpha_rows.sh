#!/usr/bin/env bash
# entmax 1.3: entmax_bisect_loss and normmax_bisect_loss say that alpha may be a "Tensor of alpha
# parameters (> 1) to use for each row of X", and that they return one loss for each sample. With
# one alpha for each row (of shape (n, 1), the only one that entmax_bisect and normmax_bisect take)
# they return n x n numbers, each pairing one row's probabilities with another's alpha.
# EntmaxBisectLoss and NormmaxBisectLoss sum these and divide by n: for equal alphas, the mean is n
# times that of the same alpha as a float; with "none", the result has the wrong shape. No error, no
# warning, until backward.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 entmax==1.3
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import torch
from entmax import EntmaxBisectLoss, NormmaxBisectLoss

print("torch", torch.__version__, "entmax", version("entmax"))
torch.manual_seed(0)
rows = 8
logits = torch.randn(rows, 5, dtype=torch.float64)
labels = torch.randint(5, (rows,))
equal = torch.full((rows, 1), 1.5, dtype=torch.float64)
different = torch.linspace(1.2, 2.0, rows, dtype=torch.float64).unsqueeze(1)


is_as_described = True
for criterion in (EntmaxBisectLoss, NormmaxBisectLoss):
    expected = criterion(alpha=1.5)(logits, labels).item()
    loss = criterion(alpha=equal)(logits, labels).item()
    losses = criterion(alpha=different, reduction="none")(logits, labels)
    row_by_row = torch.cat(
        [
            criterion(alpha=alpha.item(), reduction="none")(logits[[row]], labels[[row]])
            for row, alpha in enumerate(different)
        ]
    )
    mean = criterion(alpha=different)(logits, labels).item()
    print(criterion.__name__)
    print(f"    alpha 1.5:                  {expected:.4f}")
    print(f"    alpha 1.5 for each row:     {loss:.4f}, {loss / expected:.3f} times")
    print(f"    other alphas, row by row:   {row_by_row.mean():.4f} from {tuple(row_by_row.shape)}")
    print(f"    other alphas, for each row: {mean:.4f} from {tuple(losses.shape)}")
    is_as_described &= abs(loss / expected - rows) < 1e-6
    is_as_described &= losses.shape == (rows, rows) and mean > 2 * row_by_row.mean().item()
sys.exit(0 if is_as_described else "entmax now returns one loss for each row with its own alpha")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
