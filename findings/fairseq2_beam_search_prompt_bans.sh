#!/usr/bin/env bash
# fairseq2 0.8.1: in a batch, prompts that are longer than the shortest one are fed to beam
# search token by token, with the bans of generation: end-of-sequence tokens before the minimum
# length, padding, and what step processors forbid get a score of -inf also where they are the
# prompt's own. So a prompt with an end-of-sequence token inside (a chat of several turns,
# documents that are joined) has hypotheses of score -inf beside a shorter prompt, and their
# tokens are arbitrary; alone, or beside one that is as long, it gets proper ones. No error, no
# warning.
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
import math
import sys
import warnings

warnings.filterwarnings("ignore")
import torch
from fairseq2.data.tokenizers import VocabularyInfo
from fairseq2.generation.beam_search import BeamSearchSequenceGenerator
from fairseq2.generation.step_processor import NGramRepeatBlockProcessor
from fairseq2.models.mistral import MistralConfig, create_mistral_model
from fairseq2.nn import BatchLayout

PAD, END = 3, 2
torch.manual_seed(0)
config = MistralConfig(
    model_dim=32,
    num_layers=2,
    num_attn_heads=4,
    num_key_value_heads=2,
    ffn_inner_dim=64,
    vocab_size=50,
    max_seq_len=64,
)
model = create_mistral_model(config).eval()
vocab_info = VocabularyInfo(size=50, unk_idx=0, bos_idx=1, eos_idx=END, pad_idx=PAD)
short = [1, 20, 21]
plain = [1, 7, 8, 9, 5, 10, 11, 12]
with_end = [1, 7, 8, 9, END, 10, 11, 12]
with_repeat = [1, 7, 8, 9, 5, 7, 8, 12]


def best_of_first(prompts, step_processors=()):
    """Return the best hypothesis of the first prompt, the first 4 tokens of it, and its score."""
    generator = BeamSearchSequenceGenerator(
        model, vocab_info, beam_size=3, max_gen_len=20, step_processors=step_processors
    )
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    layout = BatchLayout.of(ids, [len(prompt) for prompt in prompts])
    best = generator(ids, layout).hypotheses[0][0]
    return best.seq.tolist()[:4], best.score.item()


is_as_described = True
for name, prompt, processors in (
    ("no end of sequence", plain, ()),
    ("an end of sequence", with_end, ()),
    ("a bigram twice", with_repeat, ()),
    ("a bigram twice, not to be generated twice", with_repeat, (NGramRepeatBlockProcessor(2),)),
):
    found = {}
    for beside, prompts in (
        ("alone", (prompt,)),
        ("beside one as long", (prompt, plain)),
        ("beside a shorter one", (prompt, short)),
    ):
        found[beside] = best_of_first(prompts, processors)
        tokens, score = found[beside]
        print(f"a prompt with {name}, {beside:20}: score {score:.4f}, tokens {tokens}")
    (tokens, score), as_long, shorter = found.values()
    is_as_described &= as_long[0] == tokens and abs(as_long[1] - score) < 1e-4
    if prompt is with_end or processors:
        is_as_described &= shorter[1] == -math.inf and shorter[0] != tokens
    else:
        is_as_described &= shorter[0] == tokens and math.isfinite(shorter[1])
sys.exit(0 if is_as_described else "bans no longer count for prompts")
PROGRAM
PYTHONPATH="$folder" "$folder/venv/bin/python" "$folder/program.py"
