#!/usr/bin/env bash
# fairseq2 0.8.1: local layers of Gemma 3n attend to a sliding window of 512 tokens
# (sliding_window). With a state bag, that is in decoding, their cache keeps every token (the
# factory gives them no LocalAttentionStateFactory, as Mistral's does), and the window is not
# applied if the queries are fewer than it. So they attend to all tokens, and from the 513th on
# the logits of a generated text are others than those of the model's forward, which training
# uses. No error, no warning; with a window as long as the text both are equal.
# (fairseq2n, the part in C++, wants a CUDA build of torch and is not called here: an empty
# module stands in for it, with the flag with which fairseq2 builds its documentation.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==4.57.3 \
    tiktoken==0.12.0 ruamel.yaml==0.18.16 rich==14.2.0 clusterscope==0.0.32 \
    importlib-metadata==7.2.1 importlib-resources==6.5.2 packaging==24.2
"$folder/venv/bin/pip" install --quiet --no-deps fairseq2==0.8.1
mkdir "$folder/fairseq2n"
echo "DOC_MODE = True" > "$folder/fairseq2n/__init__.py"
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

warnings.filterwarnings("ignore")
import torch
from fairseq2.models.gemma3n.config import Gemma3nConfig
from fairseq2.models.gemma3n.factory import create_gemma3n_model
from fairseq2.models.mistral import MistralConfig, create_mistral_model
from fairseq2.nn import BatchLayout, IncrementalStateBag

LENGTH, PROMPT_LENGTH = 40, 12
torch.manual_seed(0)
ids = torch.randint(50, (1, LENGTH))
sizes = dict(
    model_dim=32, num_attn_heads=4, num_key_value_heads=2, vocab_size=50, max_seq_len=64,
    ffn_inner_dim=64,
)  # fmt: skip


def make_gemma(window):
    config = Gemma3nConfig(
        **sizes,
        num_layers=5,
        head_dim=8,
        altup_hidden_dim=64,
        num_kv_shared_layers=0,
        laurel_rank=4,
        vocab_size_per_layer_input=50,
        hidden_size_per_layer_input=8,
        sliding_window=window,
    )
    return create_gemma3n_model(config)


def make_mistral(window):
    return create_mistral_model(MistralConfig(**sizes, num_layers=5, attn_window_len=window))


is_as_described = True
for name, make in (("Mistral", make_mistral), ("Gemma 3n", make_gemma)):
    for window in (64, 16):
        torch.manual_seed(1)
        model = make(window).eval()
        with torch.no_grad():
            expected = model(ids, BatchLayout.of(ids))
            state_bag = IncrementalStateBag(LENGTH + 1)
            logits = []
            for part in (ids[:, :PROMPT_LENGTH], *ids[:, PROMPT_LENGTH:].split(1, 1)):
                logits.append(model(part, BatchLayout.of(part), state_bag=state_bag))
                state_bag.increment_step_nr(part.size(1))
        errors = (torch.cat(logits, 1) - expected).abs().amax(-1)[0]
        print(f"{name}, a window of {window}: largest logit {expected.abs().max():.2f}")
        print(f"    largest error up to token {window}: {errors[:window].max():.5f}", end="")
        if window < LENGTH:
            print(f", after it: {errors[window:].max():.5f}", end="")
        print()
        is_as_described &= errors[:window].max().item() < 1e-4
        if window < LENGTH and name == "Mistral":
            is_as_described &= errors[window:].max().item() < 1e-4
        elif window < LENGTH:
            is_as_described &= errors[window:].min().item() > 0.01
sys.exit(0 if is_as_described else "decoding now has the window of forward")
PROGRAM
PYTHONPATH="$folder" "$folder/venv/bin/python" "$folder/program.py"
