#!/usr/bin/env bash
# torch 2.13.0, CPU: torch.compile adds what scatter_add sends to one place in bf16 or fp16 itself,
# one after the other, so that a sum stops growing where the next part is below its last digit:
# ones stop at 256 in bf16 and at 2048 in fp16. In eager they do not. So a balancing loss that
# counts its experts' tokens with it takes experts of 256 and of 6000 tokens for equally busy, and
# a row that gather reads often, as of an embedding table, trains too little. scatter_reduce("sum")
# is alike, and in fp16 index_add and the gradient of index_select. No error, no warning; in fp32
# compiled and eager agree. (It needs a C++ compiler.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch

torch.set_num_threads(1)
TOKENS = (6000, 1500, 500, 192)  # of four experts
experts = torch.arange(4).repeat_interleave(torch.tensor(TOKENS))


def count(weights):
    return torch.zeros(4, dtype=weights.dtype).scatter_add(0, experts, weights)


def gradient_of_gather(table):
    rows = experts[:, None].expand(-1, table.shape[1])
    return torch.autograd.grad(table.gather(0, rows).sum(), table)[0][:, 0]


def balancing_loss(logits):
    """Return the loss of the Switch Transformer (2101.03961)."""
    share = count(torch.ones(len(logits), dtype=logits.dtype)) / len(logits)
    return len(TOKENS) * (share * logits.softmax(-1).mean(0)).sum()


is_as_described = True
for dtype, largest in ((torch.float32, 1e9), (torch.float16, 2048), (torch.bfloat16, 256)):
    weights = torch.ones(len(experts), dtype=dtype)
    table = torch.zeros(4, 16, dtype=dtype, requires_grad=True)
    for name, function, argument in (
        ("scatter_add of ones", count, weights),
        ("gradient of gather", gradient_of_gather, table),
    ):
        torch._dynamo.reset()
        eager, compiled = function(argument), torch.compile(function)(argument)
        print(f"{dtype}, {name}: eager {eager.tolist()}, compiled {compiled.tolist()}")
        expected = torch.tensor(TOKENS, dtype=torch.float32)
        is_as_described &= torch.allclose(eager.float(), expected, rtol=0.01)
        is_as_described &= torch.allclose(compiled.float(), expected.clamp(max=largest), rtol=0.01)
    logits = torch.nn.functional.one_hot(experts, 4).to(dtype) * 4
    torch._dynamo.reset()
    eager, compiled = balancing_loss(logits).item(), torch.compile(balancing_loss)(logits).item()
    print(f"{dtype}, balancing loss: eager {eager:.3f}, compiled {compiled:.3f}")
    is_as_described &= eager > 2 and (compiled < 0.5) == (dtype == torch.bfloat16)
sys.exit(0 if is_as_described else "compiled sums no longer stop growing")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
