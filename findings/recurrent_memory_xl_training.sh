#!/usr/bin/env bash
# recurrent-memory-transformer-pytorch 0.7.0: RecurrentMemoryTransformerWrapper gets XL memories (on
# by default) of each segment and does not hand them to the next one, so a loss is of a model
# without them. generate hands them on, so it runs a model that was never trained. Nor is the
# gradient by memory_replay_backprop that of the loss: its first pass is without XL memories, its
# second one with. No error, no warning; with use_xl_memories=False all agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 \
    recurrent-memory-transformer-pytorch==0.7.0 hyper-connections==0.4.11 packaging==26.4
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F
from recurrent_memory_transformer_pytorch import (
    RecurrentMemoryTransformer,
    RecurrentMemoryTransformerWrapper,
)

torch.set_num_threads(1)
SEGMENT, SEGMENTS = 8, 4


def by_hand(model, tokens, with_xl):
    """Return the mean loss of segments that hand on memories, and XL memories if with_xl."""
    memories = xl_memories = None
    total = 0
    inputs, labels = tokens[:, :-1].split(SEGMENT, 1), tokens[:, 1:].split(SEGMENT, 1)
    for segment, label in zip(inputs, labels, strict=True):
        logits, memories, next_xl = model(segment, memories, xl_memories=xl_memories)
        xl_memories = next_xl if with_xl else None
        total = total + F.cross_entropy(logits.transpose(1, 2), label) / SEGMENTS
    return total


def gradient(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return torch.cat([found.flatten() for found in gradients if found is not None])


is_as_described = True
for use_xl_memories in (False, True):
    torch.manual_seed(0)
    model = RecurrentMemoryTransformer(
        num_tokens=20, num_memory_tokens=2, dim=32, depth=2, dim_head=16, heads=2,
        seq_len=SEGMENT, emb_gradient_frac=1.0, use_xl_memories=use_xl_memories,
    ).double()
    torch.nn.init.normal_(model.to_logits.weight)
    with torch.no_grad():  # as if trained: attention matters
        for name, parameter in model.named_parameters():
            parameter.mul_(4 if name.endswith(("to_q.weight", "to_kv.weight")) else 1)
    wrapper = RecurrentMemoryTransformerWrapper(model)
    tokens = torch.randint(20, (4, SEGMENT * SEGMENTS + 1))

    print(f"{use_xl_memories=}")
    losses = {}
    losses["without XL memories"] = by_hand(model, tokens, False)
    if use_xl_memories:
        losses["with XL memories"] = by_hand(model, tokens, True)
    losses["of the wrapper"] = wrapper(tokens, return_loss=True)[0]
    gradients = {}
    for name, loss in losses.items():
        loss.backward()
        gradients[name] = gradient(model)
    wrapper(tokens, memory_replay_backprop=True)
    gradients["of its replay"] = gradient(model)
    print("    loss", ", ".join(f"{name} {loss.item():.4f}" for name, loss in losses.items()))
    wrappers = gradients["of the wrapper"]
    off = {
        name: ((other - wrappers).norm() / wrappers.norm()).item()
        for name, other in gradients.items()
    }
    print("    gradients' distance from the wrapper's:", end=" ")
    print(", ".join(f"{name} {distance:.1%}" for name, distance in off.items()))

    prompt, new = torch.randint(20, (64, 2 * SEGMENT)), 16
    sampled = wrapper.generate(prompt, length=2 * SEGMENT + new, filter_thres=0.99)
    with torch.no_grad():
        logits = wrapper(torch.cat([prompt, sampled], 1))[0][:, 2 * SEGMENT - 1 : -1]
    agree = (logits.argmax(-1) == sampled).double().mean().item()
    print(f"    tokens of generate that are the likeliest by wrapper(): {agree:.0%}")

    is_as_described &= off["without XL memories"] < 1e-9
    if use_xl_memories:
        is_as_described &= off["with XL memories"] > 0.1 and off["of its replay"] > 0.1
        is_as_described &= agree < 0.9
    else:
        is_as_described &= off["of its replay"] < 1e-9 and agree == 1
sys.exit(0 if is_as_described else "the wrapper now trains with XL memories")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
