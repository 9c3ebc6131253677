#!/usr/bin/env bash
# pytorch-metric-learning 2.9.0: CrossBatchMemory keeps embeddings and labels of earlier batches in
# buffers, which its state_dict has, but not how many of them are filled, nor where the next batch
# goes. load_state_dict says that all keys match, and takes the memory that it has just loaded for
# empty: after resuming the first batch is compared with itself alone, the next with two, and so on.
# No error, no warning; with the two numbers set by hand, losses go on as without a stop.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 pytorch-metric-learning==2.9.0
cat > "$folder/program.py" <<'PROGRAM'
import io
import sys

import torch
from pytorch_metric_learning.losses import CrossBatchMemory, NTXentLoss

torch.manual_seed(0)
batches, batch_size, embedding_size, memory_size = 24, 16, 8, 128
classes = torch.randint(10, (batches, batch_size))
embeddings = torch.randn(10, embedding_size)[classes] + torch.randn(
    batches, batch_size, embedding_size
)


def make_loss():
    return CrossBatchMemory(NTXentLoss(), embedding_size, memory_size=memory_size)


def losses(loss, first, last):
    pairs = zip(embeddings[first:last], classes[first:last], strict=True)
    return torch.stack([loss(*pair) for pair in pairs])


def load(file):
    file.seek(0)
    loss = make_loss()
    print("load_state_dict:", loss.load_state_dict(torch.load(file)))
    return loss


is_as_described = True
for done in (3, 12):
    saved = make_loss()
    losses(saved, 0, done)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    filled, place = saved.has_been_filled, saved.queue_idx
    expected = losses(saved, done, batches)

    resumed = load(file)
    memory_is_loaded = bool(resumed.embedding_memory.any())
    counts = (resumed.has_been_filled, resumed.queue_idx)
    got = losses(resumed, done, batches)

    by_hand = load(file)
    by_hand.has_been_filled, by_hand.queue_idx = filled, place
    mended = losses(by_hand, done, batches)

    fresh = losses(make_loss(), done, batches)
    print(f"saved after {done} batches, memory of {memory_size // batch_size}; the next losses:")
    print("    without a stop:", [round(x, 3) for x in expected.tolist()[:6]])
    print("    resumed:       ", [round(x, 3) for x in got.tolist()[:6]])
    print("    set by hand:   ", [round(x, 3) for x in mended.tolist()[:6]])
    print("    empty memory:  ", [round(x, 3) for x in fresh.tolist()[:6]])
    is_as_described &= memory_is_loaded and counts == (False, 0)
    is_as_described &= torch.equal(mended, expected) and torch.equal(got, fresh)
    is_as_described &= bool((got[:2] < 0.99 * expected[:2]).all())
sys.exit(0 if is_as_described else "a loaded memory is no longer taken for empty")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
