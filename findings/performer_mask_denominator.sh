#!/usr/bin/env bash
# performer-pytorch 1.1.4: Performer's attention, given a mask for padding, sets the values of
# masked positions to zero, but not their keys. These stay in the sum that it divides by, so that
# every output shrinks with more padding, and depends on what ids the padding has. No error, no
# warning; the heads of local attention that a Performer may have mask padding right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 performer-pytorch==1.1.4
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from performer_pytorch import PerformerLM, SelfAttention

LENGTH = 16
torch.set_num_threads(1)


def padded(rows, padding, value):
    """Return rows with padding after them, and the mask that leaves it out."""
    behind = rows.new_full((rows.shape[0], padding, *rows.shape[2:]), value)
    mask = torch.ones(rows.shape[0], LENGTH + padding, dtype=torch.bool)
    mask[:, LENGTH:] = False
    return torch.cat([rows, behind], dim=1), mask


is_as_described = True
print("attention over 16 positions whose values are all 1, so that their mean is 1 everywhere:")
torch.manual_seed(0)
layer = SelfAttention(dim=32, heads=2, dim_head=16, nb_features=64).eval()
with torch.no_grad():
    layer.to_v.weight.zero_()
    layer.to_v.weight[:, 0] = 1.0
    layer.to_out.weight.copy_(torch.eye(32))
    layer.to_out.bias.zero_()
    rows = torch.randn(2, LENGTH, 32)
    rows[:, :, 0] = 1.0
    for padding in (0, 16, 48):
        outputs = layer(padded(rows, padding, 0.0)[0], mask=padded(rows, padding, 0.0)[1])
        smallest, largest = outputs[:, :LENGTH].min().item(), outputs[:, :LENGTH].max().item()
        print(f"    {padding:2} masked ones after them: outputs {smallest:.3f} to {largest:.3f}")
        is_as_described &= (smallest > 0.99) if padding == 0 else (largest < 0.9)

for name, options, is_right in (
    ("4 heads of Performer's attention", {}, False),
    ("4 heads of local attention", {"local_attn_heads": 4, "local_window_size": 8}, True),
):
    torch.manual_seed(0)
    model = PerformerLM(
        num_tokens=50, max_seq_len=64, dim=32, depth=2, heads=4, dim_head=8, **options
    ).eval()
    ids = torch.randint(5, 50, (2, LENGTH))
    with torch.no_grad():
        alone = model(ids, mask=torch.ones_like(ids, dtype=torch.bool))
        changes = []
        for padding, value in ((16, 0), (16, 3), (48, 0)):
            longer, mask = padded(ids, padding, value)
            changes.append((model(longer, mask=mask)[:, :LENGTH] - alone).abs().max().item())
    print(f"{name}: logits change by up to", ", ".join(f"{change:.1e}" for change in changes))
    print("    with 16 masked ids 0, 16 masked ids 3, 48 masked ids 0 after them")
    is_as_described &= (max(changes) < 1e-4) if is_right else (min(changes) > 0.05)
sys.exit(0 if is_as_described else "Performer no longer counts masked keys in its denominator")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
