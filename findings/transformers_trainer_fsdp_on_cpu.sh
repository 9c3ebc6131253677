#!/usr/bin/env bash
# transformers 5.24.0 with accelerate 1.15.0: Trainer with fsdp=True on CPUs (gloo) wraps the model
# in DistributedDataParallel: each rank holds all parameters, unsharded. No error, no warning. FSDP2
# itself (torch's fully_shard) shards on CPUs, as the program shows first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 \
    accelerate==1.15.0
cat > "$folder/program.py" <<'PROGRAM'
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

options = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=1, use_cpu=True, report_to="none", save_strategy="no",
    disable_tqdm=True, fsdp=True, fsdp_config=options,
)
config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2,
)
rows = [{"input_ids": x, "labels": x} for x in torch.randint(64, (8, 12))]
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
trainer.train()

linear = fully_shard(nn.Linear(4, 4))
here = linear.weight.to_local().numel()
size = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
of_rank = sum(p.numel() for p in trainer.model_wrapped.parameters())
if dist.get_rank() == 0:
    print("fully_shard: a rank holds", here, "of", linear.weight.numel(), "numbers")
    print("Trainer(fsdp=True): a rank holds", of_rank, "of", size, "numbers")
    print("its model is a", type(trainer.model_wrapped).__name__)
is_ddp = isinstance(trainer.model_wrapped, DistributedDataParallel)
is_as_described = here == 8 and is_ddp and of_rank == size
dist.destroy_process_group()
sys.exit(0 if is_as_described else "fsdp=True is no longer ignored")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
