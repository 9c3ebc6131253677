#!/usr/bin/env bash
# deepspeed 0.19.8: the backward of sequence_tiled_compute with output_reduction="mean" divides the
# gradient that it is given by the number of shards, in place. Autograd gives the same tensor to the
# other terms of a sum. So in tiled loss + auxiliary loss, the latter computed first, as a router's
# is, the gradient of the auxiliary loss is too small by the number of shards. The loss is right. No
# error, no warning; with output_reduction="sum" all gradients are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet deepspeed==0.19.8
cat > "$folder/program.py" <<'PROGRAM'
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

torch.set_num_threads(1)
torch.manual_seed(0)
SHARDS = 4
x = torch.randn(1, 8, 4, dtype=torch.float64)
labels = torch.randint(6, (1, 8))
head_weight = torch.randn(6, 4, dtype=torch.float64)
router_weight = torch.randn(4, 3, dtype=torch.float64)


def gradients(reduction):
    """Return loss and gradients of hidden, head and router; without tiles if reduction is None."""
    hidden, head, router = (t.clone().requires_grad_() for t in (x, head_weight, router_weight))
    auxiliary = (hidden.detach() @ router).square().mean()

    def mean_loss(hidden, labels):
        return F.cross_entropy((hidden @ head.T).flatten(0, 1), labels.flatten())

    def part_of_mean(hidden, labels):
        return mean_loss(hidden, labels) / SHARDS

    if reduction is None:
        loss = mean_loss(hidden, labels)
    else:
        loss = sequence_tiled_compute(
            fn=mean_loss if reduction == "mean" else part_of_mean,
            seqlen=8,
            shards=SHARDS,
            kwargs_to_shard={"hidden": hidden, "labels": labels},
            kwargs_to_pass={},
            grad_requiring_tensor_key="hidden",
            compute_params=[head],
            output_unshard_dimension=0,
            output_reduction=reduction,
        )
    total = loss + auxiliary
    total.backward()
    return total.detach(), hidden.grad, head.grad, router.grad


expected = gradients(None)
is_as_described = True
for reduction in ("sum", "mean"):
    got = gradients(reduction)
    names = ("loss", "gradient of hidden", "of head", "of router")
    ratios = [(a.norm() / b.norm()).item() for a, b in zip(got, expected)]
    print(f"{reduction}, relative to no tiles:", end=" ")
    print(", ".join(f"{name} {ratio:.4f}" for name, ratio in zip(names, ratios)))
    router_factor = SHARDS if reduction == "mean" else 1
    is_as_described &= all(torch.allclose(a, b) for a, b in zip(got[:3], expected[:3]))
    is_as_described &= torch.allclose(got[3] * router_factor, expected[3])
sys.exit(0 if is_as_described else "the gradient of the auxiliary loss is no longer too small")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
