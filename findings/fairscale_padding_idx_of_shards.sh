#!/usr/bin/env bash
# fairscale 0.4.13: VocabParallelEmbedding takes padding_idx for a row of each rank's part of the
# vocabulary. So beside the padding token, one token of every other rank gets no gradient and never
# learns: with 16 tokens on 2 ranks and padding_idx=3, token 11 too. No error, no warning (only a
# padding_idx beyond the rows of one rank, as 11, raises). The class is "mainly adapted from
# torch.nn.Embedding", where padding_idx is one token.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 fairscale==0.4.13
cat > "$folder/program.py" <<'PROGRAM'
import contextlib
import io
import sys

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import destroy_model_parallel, initialize_model_parallel
from fairscale.nn.model_parallel.layers import VocabParallelEmbedding

dist.init_process_group("gloo")
with contextlib.redirect_stdout(io.StringIO()):
    initialize_model_parallel(dist.get_world_size())
rank, vocab_size, hidden_size, padding_idx = dist.get_rank(), 16, 4, 3
torch.manual_seed(0)
weight = torch.randn(vocab_size, hidden_size)
ids = torch.randint(vocab_size, (8, 32))
upstream = torch.randn(8, 32, hidden_size)


def is_unchanged_by_step(embedding):
    """Return the outputs, and for each row of the weight if a step of SGD leaves it as it is."""
    before = embedding.weight.detach().clone()
    outputs = embedding(ids)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    outputs.backward(upstream)
    optimizer.step()
    return outputs.detach(), (embedding.weight == before).all(-1).int()


expected = torch.nn.Embedding(vocab_size, hidden_size, padding_idx=padding_idx)
parallel = VocabParallelEmbedding(vocab_size, hidden_size, padding_idx=padding_idx)
with torch.no_grad():
    expected.weight.copy_(weight)
    parallel.weight.copy_(weight[parallel.vocab_start_index : parallel.vocab_end_index])
outputs, is_unchanged = is_unchanged_by_step(expected)
outputs_parallel, is_unchanged_here = is_unchanged_by_step(parallel)
of_ranks = [torch.empty_like(is_unchanged_here) for _ in range(dist.get_world_size())]
dist.all_gather(of_ranks, is_unchanged_here)
unchanged = is_unchanged.nonzero().flatten().tolist()
unchanged_parallel = torch.cat(of_ranks).nonzero().flatten().tolist()
if rank == 0:
    print(f"padding_idx={padding_idx}, every token occurs: {ids.unique().numel() == vocab_size}")
    print(f"torch.nn.Embedding:     a step leaves the tokens {unchanged} as they are")
    print(f"VocabParallelEmbedding: a step leaves the tokens {unchanged_parallel} as they are")
    print(f"outputs are the same: {torch.equal(outputs, outputs_parallel)}")
dist.barrier()
destroy_model_parallel()
dist.destroy_process_group()
is_as_described = unchanged == [3] and unchanged_parallel == [3, 11]
is_as_described &= torch.equal(outputs, outputs_parallel)
sys.exit(0 if is_as_described else "only the padding token is now left as it is")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
