#!/usr/bin/env bash
# hyper-connections 0.4.11: with num_fracs above 1, as num_fracs=4 of its README, a new connection
# is no residual connection, as it is with 1: the columns of its initial matrix are dealt out in the
# wrong order. Its branch sees the first fraction of the features again and again, and not the last,
# and with 4 fractions the residual is changed, too, some of it lost, though the branch returns 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 hyper-connections==0.4.11
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from hyper_connections import get_init_and_expand_reduce_stream_functions

size, streams = 16, 1


class Zero(torch.nn.Module):
    """A branch that adds nothing, and keeps what it saw."""

    def forward(self, x):
        self.saw = x
        return torch.zeros_like(x)


def fractions_in(result, x, count):
    """Name the fraction of x that each fraction of the result is equal to."""
    names = []
    for part in result.chunk(count, dim=-1):
        equal = [i for i, own in enumerate(x.chunk(count, dim=-1)) if torch.equal(part, own)]
        names.append(equal[0] if len(equal) == 1 else "?")
    return names


torch.manual_seed(0)
x = torch.randn(2, 5, size)
found = {}
for count in (1, 2, 4):
    make, expand, reduce = get_init_and_expand_reduce_stream_functions(
        streams, num_fracs=count, dim=size, disable=False
    )
    branch = Zero()
    with torch.no_grad():
        left = reduce(make(branch=branch, layer_index=0)(expand(x)))
    seen = fractions_in(branch.saw, x, count)
    kept = fractions_in(left, x, count)
    found[count] = seen, kept
    print(f"num_fracs={count}: the branch sees fractions {seen}, the residual has {kept}")
is_as_described = found[1] == ([0], [0])
is_as_described &= found[2] == ([0, 0], [0, 1])
seen, kept = found[4]
is_as_described &= seen != [0, 1, 2, 3] and 3 not in seen
is_as_described &= kept != [0, 1, 2, 3] and len(set(kept)) < 4
sys.exit(0 if is_as_described else "a new connection of fractions is now a residual connection")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
