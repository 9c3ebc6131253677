#!/usr/bin/env bash
# product-key-memory 0.3.0: with concat_values_and_combine=True PKM sums up the values that a query
# finds, all with weight 1. It computes the attention over them (the softmax of their scores, in the
# paper, arXiv 1907.05242, their weights) and does not use it. So queries and keys have no gradient
# and stay as they were made, and which value is nearer makes no difference. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 product-key-memory==0.3.0 \
    colt5-attention==0.11.2
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from product_key_memory import PKM

HEADS, TOP, DIM = 2, 4, 16
is_as_described = True
for combine in (False, True):
    torch.manual_seed(0)
    memory = PKM(
        dim=DIM, heads=HEADS, num_keys=8, topk=TOP, dim_head=8, concat_values_and_combine=combine
    )
    optimizer = torch.optim.Adam(memory.parameters(), lr=1e-2)
    before = {name: value.detach().clone() for name, value in memory.named_parameters()}
    x = torch.randn(4, 32, DIM)
    for _ in range(20):
        loss = (memory(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    still = [name for name, value in memory.named_parameters() if value.equal(before[name])]
    print(f"concat_values_and_combine={combine}: parameters that stay as they were:", *still)

    weights = []
    memory.attn_dropout.register_forward_hook(lambda module, args, output: weights.append(output))
    taken = []
    memory.values.register_forward_hook(lambda module, args, output: taken.append(output))
    with torch.no_grad():
        output = memory(x)
        equal = torch.full_like(weights[0], 1 / TOP)
        memory.attn_dropout.register_forward_hook(lambda module, args, output: equal)
        change = (memory(x) - output).abs().max().item()
    print(f"    largest attention of a query {weights[0].max():.2f}; with equal ones", end=" ")
    print(f"outputs change by {change:.4f}")
    if combine:
        own = taken[0].view(4 * 32, HEADS, TOP, -1).sum(2).flatten(1)
        own = memory.maybe_concat_combine[-1](own).view(4, 32, DIM)
        is_as_described &= change == 0 and torch.allclose(output, own, atol=1e-5)
        is_as_described &= still == ["keys", "to_queries.weight", "norm.weight", "norm.bias"]
    else:
        is_as_described &= change > 0.01 and not still
sys.exit(0 if is_as_described else "values are now weighted by attention")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
