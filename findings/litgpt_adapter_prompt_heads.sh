#!/usr/bin/env bash
# litgpt 0.5.13: an adapter's prompt is to be attended to by keys and values that the layer's own
# projection makes of it. The rows of that projection are all queries, then all keys, then all
# values, but the adapter reads them as they were in older versions, a group of heads after the
# other. So most of its keys and values are queries, keys and values of other heads: the first
# head's keys are the second's queries. Adapters that older versions trained compute something else.
# No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 litgpt==0.5.13
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch

warnings.filterwarnings("ignore")
from litgpt.adapter import GPT, Config  # noqa: E402

torch.manual_seed(0)
HEADS, SIZE = 4, 8
is_as_described = True
for groups in (4, 2):
    config = Config(
        n_layer=1, n_head=HEADS, n_query_groups=groups, n_embd=HEADS * SIZE, padded_vocab_size=64,
        block_size=64, adapter_prompt_length=5, adapter_start_layer=0, bias=False,
    )
    model = GPT(config)
    attention = model.transformer.h[0].attn
    with torch.no_grad():
        model(torch.arange(3).view(1, 3))
        projected = attention.qkv(attention.adapter_wte.weight)
    names = [f"query {i}" for i in range(HEADS)]
    names += [f"{kind} {i}" for kind in ("key", "value") for i in range(groups)]
    rows = projected.view(5, len(names), SIZE).transpose(0, 1)
    print(f"{HEADS} heads in {groups} groups; projections of the prompt that are used:")
    for kind, used in zip(("key", "value"), attention.adapter_kv_cache, strict=True):
        found = []
        for head in range(HEADS):
            distances = (rows - used[0, head]).abs().amax((1, 2))
            is_as_described &= distances.min().item() < 1e-6
            found.append(names[distances.argmin()])
        expected = [f"{kind} {head * groups // HEADS}" for head in range(HEADS)]
        print(f"    as {kind}s of heads 0 to 3: {', '.join(found)}; to be {', '.join(expected)}")
        is_as_described &= found != expected
sys.exit(0 if is_as_described else "the adapter uses the keys and values of its prompt")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
