#!/usr/bin/env bash
# transformers 5.24.0 (4.57.6 does the same): ProphetNet's decoder gives positions each other's
# relative position biases: it computes these in the order (position, stream, head) and reads them
# as (stream, head, position). So the logits of a position depend on how many target tokens follow,
# and those of the first one on which follow. What a model is trained and scored on is not what
# generate() computes, which with its cache, one token at a time, is right. No error, no warning;
# BART's logits of a position are the same whatever follows, and those of generate().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    ProphetNetConfig,
    ProphetNetForConditionalGeneration,
)

LENGTH = 7
shape = {
    "vocab_size": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2,
}
MODELS = (
    (
        BartForConditionalGeneration,
        BartConfig(
            **shape, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, forced_eos_token_id=None,
        ),
    ),
    (
        ProphetNetForConditionalGeneration,
        ProphetNetConfig(
            **shape, hidden_size=32, num_encoder_layers=2, num_decoder_layers=2,
            num_encoder_attention_heads=4, num_decoder_attention_heads=4,
        ),
    ),
)
torch.manual_seed(0)
source = torch.randint(3, 64, (1, 9))


def largest(values):
    return values.abs().max().item()


is_as_described = True
for model_class, config in MODELS:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)  # the logits of fresh models are small

        def logits(target):
            return model(input_ids=source, decoder_input_ids=target, use_cache=False).logits[0]

        generated = model.generate(
            source, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False, num_beams=1,
            return_dict_in_generate=True, output_logits=True,
        )
        target = generated.sequences[:, :LENGTH]
        whole = logits(target)
        by_generate = torch.cat(generated.logits)
        by_prefixes = torch.stack([logits(target[:, :n])[-1] for n in range(1, LENGTH + 1)])
        other = target.clone()
        other[:, 1:] = (target[:, 1:] + 20) % 64
        by_later = largest(logits(other)[0] - whole[0])
    print(f"{model_class.__name__}: logits of {LENGTH} target tokens, up to {largest(whole):.2f}")
    for setting, change in (
        ("without the tokens after each position: ", largest(by_prefixes - whole)),
        ("as generate() computes them:            ", largest(by_generate - whole)),
        ("of the first position, by later tokens: ", by_later),
    ):
        print(f"    {setting} change by {change:.6f}")
    changes = torch.tensor([largest(by_prefixes - whole), largest(by_generate - whole)])
    if model_class is ProphetNetForConditionalGeneration:
        is_as_described &= bool((changes > 0.1).all()) and by_later > 1e-3
        # A position alone, as in each step of generate(), has no others to be mixed up with.
        is_as_described &= largest(by_generate[0] - by_prefixes[0]) < 1e-4
    else:
        is_as_described &= bool((changes < 1e-4).all()) and by_later < 1e-4
sys.exit(0 if is_as_described else "ProphetNet's logits no longer depend on later positions")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
