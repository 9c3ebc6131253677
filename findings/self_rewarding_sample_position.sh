#!/usr/bin/env bash
# self-rewarding-lm-pytorch 0.2.12: sample, by which its trainers generate, appends an empty slot,
# fills it with token 0 and takes the new token from the logits at the slot, not from those at the
# last token. So each new token is what the model says after token 0 (or, with prompts of several
# lengths, after what stands there), not after the text. No error, no warning. A model that counts
# up by one, with all its probability, writes 5 6 7 1 1 1 1.
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

VOCAB_SIZE, LENGTH = 40, 12


class Adds(torch.nn.Module):
    """Sure that the next token is the one before plus a number; keeps what it has read."""

    def __init__(self, number):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(50.0))
        self.number = number
        self.inputs = []

    def forward(self, tokens):
        self.inputs.append(tokens.clone())
        following = (tokens + self.number) % VOCAB_SIZE
        return self.scale * torch.nn.functional.one_hot(following, VOCAB_SIZE).float()


is_as_described = True
for number in (1, 3):
    prompts = [torch.tensor([5, 5 + number, 5 + 2 * number])]
    model = Adds(number)
    written = sample(model, prompts, LENGTH, temperature=1e-3, output_keep_prompt=True)
    expected = (prompts[0][:1] + number * torch.arange(LENGTH)) % VOCAB_SIZE
    print(f"a model that adds {number}, prompt {prompts[0].tolist()}")
    print(f"    expected: {expected.tolist()}")
    print(f"    written:  {written[0].tolist()}")
    print(f"    what it read for its first and third token: {model.inputs[0][0].tolist()}", end=" ")
    print(f"and {model.inputs[2][0].tolist()}")
    is_as_described &= written[0, :3].equal(prompts[0])
    is_as_described &= bool((written[0, 3:] == number).all())
    is_as_described &= model.inputs[0][0].tolist() == [*prompts[0].tolist(), 0]
sys.exit(0 if is_as_described else "sample now reads the logits of the last token")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
