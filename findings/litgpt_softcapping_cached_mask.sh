#!/usr/bin/env bash
# litgpt 0.5.13: with a cache, as in generation, the causal mask is boolean. A model with
# attention_logit_softcapping, as Gemma 2 has, adds it to the scores: 1 where a position may look
# and 0 where it may not. So the tokens of a prompt attend to those after them, and without
# input_pos_maxp1 to empty places of the cache too: logits and generated tokens are not those of the
# same model without a cache, as it is trained. No error, no warning; without softcapping they are.
# (The authors know it and have not mended it in this version.)
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
from litgpt.config import Config  # noqa: E402
from litgpt.generate.base import generate  # noqa: E402
from litgpt.model import GPT  # noqa: E402

torch.set_num_threads(1)
PROMPT, NEW = 12, 12
is_as_described = True
for softcapping in (None, 50.0):
    torch.manual_seed(0)
    config = Config(
        n_layer=2, n_head=4, n_embd=64, padded_vocab_size=64, block_size=32,
        attention_logit_softcapping=softcapping,
    )
    model = GPT(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter.data, std=0.2)
    tokens = torch.randint(64, (20, PROMPT))
    changed = torch.cat([tokens[:, :-1], (tokens[:, -1:] + 1) % 64], dim=1)
    with torch.no_grad():
        expected = model(tokens)
        rows = tokens
        for _ in range(NEW):
            rows = torch.cat([rows, model(rows)[:, -1:].argmax(-1)], dim=1)
        model.set_kv_cache(batch_size=len(tokens))
        positions = torch.arange(PROMPT)
        logits = model(tokens, positions, input_pos_maxp1=PROMPT)
        error = (logits - expected).abs().max().item()
        other = model(changed, positions, input_pos_maxp1=PROMPT)
        leak = (logits - other)[:, :-1].abs().max().item()
        model.clear_kv_cache()
        model.set_kv_cache(batch_size=1)
        new = torch.stack([generate(model, row, PROMPT + NEW, top_k=1) for row in tokens])
        same = (new == rows).all(1).float().mean().item()
    print(f"attention_logit_softcapping={softcapping}")
    print(f"    a prompt's logits with a cache differ from those without by up to {error:.6f}")
    print(f"    if its last token changes, those of the tokens before change by up to {leak:.6f}")
    print(f"    greedy generation with a cache is as without in {same:.0%} of the rows")
    if softcapping is None:
        is_as_described &= error < 1e-3 and leak < 1e-3 and same > 0.9
    else:
        is_as_described &= error > 0.1 and leak > 0.1 and same < 0.5
sys.exit(0 if is_as_described else "the prompt of a model with softcapping is causal with a cache")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
