#!/usr/bin/env bash
# fairseq2 0.8.1: its sequence generators count min_gen_len, "the minimum generation length",
# from the end of the longest prompt of a batch, and 1 is its default. So a shorter prompt may
# not end before it is as long as the longest: it goes on behind what the model takes for the
# end, with whatever comes next. What is generated depends on the prompts beside it; alone, or
# beside prompts of its length, it is right. No error, no warning.
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
from fairseq2.generation.sampling import SamplingSequenceGenerator, TopKSampler
from fairseq2.models.clm import CausalLM
from fairseq2.nn import BatchLayout

END, PAD, LAST, VOCAB_SIZE = 2, 3, 19, 20


class Counting(CausalLM):
    """Predicts the next number after each, and the end after the last number."""

    def forward(self, seqs, seqs_layout, *, state_bag=None):
        following = torch.where(seqs == LAST, END, (seqs + 1).clamp(max=LAST))
        return 10.0 * torch.nn.functional.one_hot(following, VOCAB_SIZE).float()


model = Counting(max_seq_len=64)
vocab_info = VocabularyInfo(size=VOCAB_SIZE, unk_idx=0, bos_idx=1, eos_idx=END, pad_idx=PAD)
generators = {
    "sampling, k = 1": SamplingSequenceGenerator(model, vocab_info, TopKSampler(1)),
    "beam search": BeamSearchSequenceGenerator(model, vocab_info, beam_size=1),
}


def generate(generator, prompts):
    """Return what is generated after each prompt."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    output = generator(ids, BatchLayout.of(ids, [len(row) for row in rows]))
    return [hypotheses[0].seq.tolist() for hypotheses in output.hypotheses]


short, other, long = [1, 16, 17], [1, 15, 16], [1] + list(range(5, 17))
is_as_described = True
for name, generator in generators.items():
    print(f"{name}, after a prompt that ends in 17; {LAST} is followed by {END}, the end")
    for beside, prompts in (
        ("alone", [short]),
        ("beside one as long", [short, other]),
        (f"beside one {len(long) - len(short)} longer", [short, long]),
    ):
        tokens, *rest = generate(generator, prompts)
        print(f"    {beside:22}: {tokens}", end="")
        print(f", the other: {rest[0]}" if rest else "")
        if prompts[-1] is long:
            is_as_described &= rest == [[17, 18, 19, END]]
            is_as_described &= tokens[:2] == [18, 19] and END not in tokens[:10]
        else:
            is_as_described &= tokens == [18, 19, END]
sys.exit(0 if is_as_described else "shorter prompts may now end when they end")
PROGRAM
PYTHONPATH="$folder" "$folder/venv/bin/python" "$folder/program.py"
