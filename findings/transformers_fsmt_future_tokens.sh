#!/usr/bin/env bash
# transformers 5.24.0: FSMT called with decoder_input_ids and without labels lets each position see
# the tokens after it, though its documentation says "Causal mask will also be used by default". It
# makes that mask only if use_cache is off, and config.use_cache is on. So a loss of one's own, and
# the score of a given translation, are of a model that reads the token that it predicts; with
# labels, which turn use_cache off, they are right. No error, no warning; BART's are the same both
# ways.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from torch.nn.functional import cross_entropy
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    FSMTConfig,
    FSMTForConditionalGeneration,
)
from transformers.utils import logging

logging.set_verbosity_error()
shape = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0,
    "max_position_embeddings": 64,
}
MODELS = (
    (BartForConditionalGeneration, BartConfig(**shape, vocab_size=64)),
    (
        FSMTForConditionalGeneration,
        FSMTConfig(**shape, langs=["en", "de"], src_vocab_size=64, tgt_vocab_size=64),
    ),
)
torch.manual_seed(0)
source, target = torch.randint(3, 64, (2, 32, 12))
start = torch.full((32, 1), 2)
decoder_input_ids = torch.cat([start, target[:, :-1]], 1)
inputs = {"input_ids": source, "decoder_input_ids": decoder_input_ids}


def loss_of(model, with_labels):
    """Return the model's cross entropy, computed by the model or from its logits."""
    if with_labels:
        return model(**inputs, labels=target).loss
    return cross_entropy(model(**inputs).logits.flatten(0, 1), target.flatten())


is_as_described = True
for model_class, config in MODELS:
    torch.manual_seed(0)
    model = model_class(config).eval()
    other = decoder_input_ids.clone()
    other[:, 6:] = (other[:, 6:] + 20) % 64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.requires_grad:
                parameter.normal_(0, 0.15)  # the logits of fresh models are small
        whole = model(**inputs).logits
        changed = model(input_ids=source, decoder_input_ids=other).logits
    by_later = (changed - whole)[:, :6].abs().max().item()
    print(f"{model_class.__name__}: logits up to {whole.abs().max():.2f}")
    print(f"    those of 6 positions change by {by_later:.4f} if later tokens are others")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss = loss_of(model, with_labels=False)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        own, by_labels = (loss_of(model, is_given).item() for is_given in (False, True))
    print(f"    loss after 60 steps on that of its logits: {own:.3f}, with labels {by_labels:.3f}")
    if model_class is FSMTForConditionalGeneration:
        is_as_described &= by_later > 0.1 and by_labels > own + 0.5
    else:
        is_as_described &= by_later < 1e-4 and abs(by_labels - own) < 1e-3
sys.exit(0 if is_as_described else "FSMT no longer sees the tokens after a position")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
