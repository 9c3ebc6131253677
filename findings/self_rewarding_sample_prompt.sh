#!/usr/bin/env bash
# self-rewarding-lm-pytorch 0.2.12: sample is to return new tokens only, unless
# output_keep_prompt=True. By default it returns prompt, new tokens and padding of ends (-1), all
# but tokens of id 0. Lengths of prompts are advanced in place while it writes, so in the end all is
# prompt; and in its mask, "out != pad_id & ~prompt_mask", & binds first, which compares tokens with
# 0. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 \
    self-rewarding-lm-pytorch==0.2.12 accelerate==1.15.0 beartype==0.23.1 ema-pytorch==0.8.3 \
    einx==0.4.3
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch

warnings.simplefilter("ignore")
from self_rewarding_lm_pytorch.sampling_utils import sample  # noqa: E402

VOCAB_SIZE, LENGTH = 20, 10


class Writes(torch.nn.Module):
    """Sure of each token by its place alone."""

    def __init__(self, text):
        super().__init__()
        logits = 50 * torch.nn.functional.one_hot(torch.tensor(text), VOCAB_SIZE).float()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, tokens):
        return self.logits[: tokens.shape[1]].expand(len(tokens), -1, -1)


is_as_described = True
prompts = [torch.tensor([7, 0, 9]), torch.tensor([7, 0, 9, 4])]
for text, eos_id in (([2] * 3 + [8, 1, 12, 0, 1, 15, 16, 17], None), ([2] * 6 + [19] * 5, 19)):
    options = {"temperature": 1e-3, "eos_id": eos_id}
    rows = sample(Writes(text), prompts, LENGTH, output_keep_prompt=True, **options)
    found = sample(Writes(text), prompts, LENGTH, **options)
    print(f"prompts {[prompt.tolist() for prompt in prompts]}, {eos_id=}")
    for row, prompt, new in zip(rows, prompts, found, strict=True):
        ours = row[len(prompt) :]
        expected = ours[ours >= 0]
        print(f"    with the prompt {row.tolist()}")
        print(f"    without it, expected {expected.tolist()}, found {new.tolist()}")
        is_as_described &= new.equal(row[row != 0]) and new[:2].tolist() == [7, 9]
        is_as_described &= not new.equal(expected)
sys.exit(0 if is_as_described else "sample now leaves the prompt out")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
