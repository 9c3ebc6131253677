#!/usr/bin/env bash
# fairseq2 0.8.1: prefill_chunk_size of its sequence generators, 512 by default, is to say in
# which chunks a prompt is computed. For models with a sliding window (Mistral, OLMo 3; 4096
# tokens by default) it changes scores, and so what is chosen, once the prompt is longer than the
# window: the cache keeps the keys of the last window of tokens, counted from the end of a chunk,
# and drops older ones before the chunk is computed. So the first token of a chunk misses as many
# keys of its own window as the chunk has tokens behind it: with chunks of 512 a window of 4096
# is at times one of 3585. No error, no warning. Without chunks, or with a prompt that fits the
# window, scores are those of the model's forward.
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
from fairseq2.data.tokenizers import VocabularyInfo
from fairseq2.generation.beam_search import BeamSearchSequenceGenerator
from fairseq2.models.mistral import MistralConfig, create_mistral_model
from fairseq2.nn import BatchLayout

VOCAB_SIZE, PROMPT_LENGTH = 50, 200
torch.manual_seed(0)
prompt = torch.randint(4, VOCAB_SIZE, (1, PROMPT_LENGTH))
vocab_info = VocabularyInfo(size=VOCAB_SIZE, unk_idx=0, bos_idx=1, eos_idx=2, pad_idx=3)


def make_model(window):
    torch.manual_seed(1)
    config = MistralConfig(
        model_dim=32,
        num_layers=2,
        num_attn_heads=4,
        num_key_value_heads=2,
        ffn_inner_dim=64,
        vocab_size=VOCAB_SIZE,
        max_seq_len=256,
        attn_window_len=window,
    )
    return create_mistral_model(config).eval()


def log_probabilities(model, ids):
    """Return those of the tokens after the first, by the model's forward."""
    with torch.no_grad():
        logits = model(ids, BatchLayout.of(ids))
    return -torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")


is_as_described = True
for window in (256, 64):
    model = make_model(window)
    print(f"a window of {window} tokens, a prompt of {PROMPT_LENGTH}")
    for chunk_size in (None, 512, 64, 32, 8):
        generator = BeamSearchSequenceGenerator(
            model,
            vocab_info,
            beam_size=1,
            max_gen_len=8,
            echo_prompt=True,
            normalize_scores=False,
            prefill_chunk_size=chunk_size,
        )
        best = generator(prompt, BatchLayout.of(prompt)).hypotheses[0][0]
        expected = log_probabilities(model, best.seq[None])
        errors = (best.step_scores[1:] - expected).abs()
        generated = best.seq[PROMPT_LENGTH:].tolist()
        print(f"    prefill_chunk_size {chunk_size!s:4}: score {best.score:.3f},", end=" ")
        print(f"by forward {expected.sum():.3f}, one token {errors.max():.4f} off, {generated}")
        if window > PROMPT_LENGTH or chunk_size in (None, 512):
            is_as_described &= errors.max().item() < 1e-3
        else:
            is_as_described &= errors[: window - 1].max().item() < 1e-3
            is_as_described &= errors[window - 1 :].max().item() > 0.05
sys.exit(0 if is_as_described else "prefill in chunks is now that of the whole prompt")
PROGRAM
PYTHONPATH="$folder" "$folder/venv/bin/python" "$folder/program.py"
