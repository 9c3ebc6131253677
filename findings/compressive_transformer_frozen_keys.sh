#!/usr/bin/env bash
# compressive-transformer-pytorch 0.4.0: keys and values of a layer learn only until it compresses
# memory for the first time, which is in the second segment. To keep the reconstruction loss from
# them, training then calls detach_ on their weight, for which requires_grad turns off for good.
# Everything else goes on learning. No error, no warning. A layer without memory (not in
# memory_layers) keeps learning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 \
    compressive-transformer-pytorch==0.4.0 mogrifier==0.0.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from compressive_transformer_pytorch import AutoregressiveWrapper, CompressiveTransformer

torch.manual_seed(0)
torch.set_num_threads(1)
SEGMENT = 16
model = CompressiveTransformer(
    num_tokens=20, dim=32, seq_len=SEGMENT, mem_len=SEGMENT, cmem_len=4, depth=2, heads=2,
    memory_layers=[2],
)
wrapper = AutoregressiveWrapper(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
weights = {
    name: value
    for name, value in model.named_parameters()
    if name.endswith(("to_q.weight", "to_kv.weight"))
}

is_as_described = True
last = {name: weight.detach().clone() for name, weight in weights.items()}
for step in range(2):
    tokens = torch.randint(20, (4, 3 * SEGMENT + 1))
    for segment, (loss, aux_loss, _) in enumerate(wrapper(tokens, return_loss=True)):
        optimizer.zero_grad()
        (loss + aux_loss).backward()
        optimizer.step()
        print(f"step {step}, segment {segment}; largest change of", end="")
        for name, weight in weights.items():
            moved = (weight.detach() - last[name]).abs().max().item()
            last[name] = weight.detach().clone()
            layer, part = int(name.split(".")[1]) + 1, name.split(".")[-2]
            print(f"  {part} {layer}: {moved:.4f}", end="")
            is_compressed = layer == 2 and part == "to_kv" and (step, segment) > (0, 0)
            is_as_described &= (moved == 0) == is_compressed
        print()
kept = {name: weight.requires_grad for name, weight in weights.items()}
print("requires_grad in the end:", *kept.values())
is_as_described &= list(kept.values()) == [True, True, True, False]
sys.exit(0 if is_as_described else "keys and values now learn after the first compression")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
