#!/usr/bin/env bash
# colossalai 0.5.0: cross_entropy_1d, its cross-entropy of logits split by class, gives a token
# whose label is ignore_index no loss, but a gradient if ignore_index is an id of the vocabulary, as
# that of padding: its label's logit gets minus that of a token that counts, all others none. So
# training raises the logit of padding wherever there is padding. No error, no warning; with -100,
# the default, and in F.cross_entropy there is no gradient.
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
import sys
import warnings

warnings.filterwarnings("ignore")
logging.disable()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from colossalai.shardformer.layer.loss import cross_entropy_1d  # noqa: E402

dist.init_process_group("gloo")
rank, world_size, tokens, vocab_size, padding_id = dist.get_rank(), dist.get_world_size(), 6, 16, 0
torch.manual_seed(0)
logits = torch.randn(tokens, vocab_size)
labels = torch.randint(1, vocab_size, (tokens,))
labels[4:] = padding_id
columns = logits.chunk(world_size, dim=-1)[rank]


def compare(ids, ignore_index):
    """Return loss and gradient here, and those that F.cross_entropy gives."""
    here = columns.clone().requires_grad_()
    loss = cross_entropy_1d(
        here, ids, ignore_index=ignore_index, process_group=dist.group.WORLD,
        vocab_size=vocab_size, dtype=torch.float32,
    )
    loss.backward()
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, ids, ignore_index=ignore_index)
    expected.backward()
    gathered = [torch.empty_like(here.grad) for _ in range(world_size)]
    dist.all_gather(gathered, here.grad)
    return loss.item(), torch.cat(gathered, -1), expected.item(), whole.grad


is_as_described = True
for ids, ignore_index in (
    (torch.where(labels == padding_id, -100, labels), -100),
    (labels, padding_id),
):
    loss, gradient, expected, expected_gradient = compare(ids, ignore_index)
    difference = (gradient - expected_gradient).abs()
    if rank == 0:
        print(f"ignore_index={ignore_index}, loss {loss:.5f}, F.cross_entropy {expected:.5f}")
        print(f"    gradient of tokens that count up to {difference[:4].max():.6f} off")
        print(f"    logit of id {padding_id} where ignored: {gradient[4:, padding_id].tolist()}")
        print(f"    all others there up to {gradient[4:, 1:].abs().max():.6f}")
    is_as_described &= abs(loss - expected) < 1e-5 and bool(difference[:4].max() < 1e-6)
    is_as_described &= bool((gradient[4:, 1:] == 0).all())
    if ignore_index == padding_id:
        is_as_described &= torch.allclose(gradient[4:, padding_id], torch.tensor(-1 / 4))
    else:
        is_as_described &= bool((gradient[4:] == 0).all())
dist.barrier()
dist.destroy_process_group()
sys.exit(0 if is_as_described else "ignored labels no longer have a gradient")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
