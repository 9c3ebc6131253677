#!/usr/bin/env bash
# colossalai 0.5.0: cross_entropy_1d, its cross-entropy of logits split by class, divides its mean
# by the number of tokens whose loss is not 0 rather than by that of the labels that count. A token
# that is predicted with a lead of about 17 has a loss of exactly 0 in fp32, and then loss and
# gradients of the others are too large; if all are, the mean is NaN. No error, no warning.
# F.cross_entropy counts such tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# colossalai pins torch<=2.5.1 and a lot that this function does not need; these are its imports
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==4.57.6 \
    peft==0.13.2 galore-torch==1.0 psutil==7.2.2 einops==0.8.2 rich==15.0.0 click==8.5.1 \
    contexttimer==0.3.3 ninja==1.13.2 pydantic==2.14.4
"$folder/venv/bin/pip" install --quiet --no-deps colossalai==0.5.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import math
import sys
import warnings

warnings.filterwarnings("ignore")
logging.disable()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from colossalai.shardformer.layer.loss import cross_entropy_1d  # noqa: E402

dist.init_process_group("gloo")
rank, world_size, tokens, vocab_size = dist.get_rank(), dist.get_world_size(), 8, 16
torch.manual_seed(0)
logits = torch.randn(tokens, vocab_size)
labels = torch.randint(vocab_size, (tokens,))
rows = torch.arange(tokens)


def compare(certain):
    """Return loss and gradients' norm, where that many tokens are certain, and those expected."""
    all_logits = logits.clone()
    all_logits[rows[:certain], labels[:certain]] = 24.0
    here = all_logits.chunk(world_size, dim=-1)[rank].clone().requires_grad_()
    loss = cross_entropy_1d(
        here, labels, process_group=dist.group.WORLD, vocab_size=vocab_size, dtype=torch.float32
    )
    loss.backward()
    whole = all_logits.requires_grad_()
    expected = F.cross_entropy(whole, labels)
    expected.backward()
    square = here.grad.square().sum()
    dist.all_reduce(square)
    return loss.item(), square.sqrt().item(), expected.item(), whole.grad.norm().item()


is_as_described = True
for certain in (0, 2, 6, 8):
    loss, norm, expected, expected_norm = compare(certain)
    if rank == 0:
        print(f"{certain} of {tokens} tokens are certain")
        print(f"    cross_entropy_1d {loss:.5f}, gradient's norm {norm:.5f}")
        print(f"    F.cross_entropy  {expected:.5f}, gradient's norm {expected_norm:.5f}")
    if certain == tokens:
        is_as_described &= math.isnan(loss) and expected < 1e-6
    else:
        factor = tokens / (tokens - certain)
        is_as_described &= abs(loss / expected / factor - 1) < 1e-4
        is_as_described &= abs(norm / expected_norm / factor - 1) < 1e-4
dist.barrier()
dist.destroy_process_group()
sys.exit(0 if is_as_described else "the mean now counts tokens whose loss is 0")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
