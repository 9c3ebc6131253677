#!/usr/bin/env bash
# transformers 5.24.0: DataCollatorForLanguageModeling with a seed, in a DataLoader with workers,
# draws the same masks in each epoch. Workers start anew for each epoch, and each makes its
# generator from the seed and its number alone. So of a text that comes at the same place, as
# without shuffling or from a stream, the same few tokens are predicted in all epochs, and the
# others never; and all ranks draw the same. No error, no warning; without a seed, without workers,
# and with persistent_workers=True each epoch has masks of its own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

EPOCHS = 20


def masks_of(tokenizer, seed, **options):
    """Return which tokens each epoch masks: [epochs, texts, tokens]."""
    torch.manual_seed(1)
    texts = [{"input_ids": list(range(10 + i, 74 + i))} for i in range(32)]
    collator = DataCollatorForLanguageModeling(tokenizer, seed=seed, mlm_probability=0.15)
    loader = DataLoader(texts, batch_size=4, collate_fn=collator, **options)
    return torch.stack(
        [torch.cat([batch["labels"] != -100 for batch in loader]) for _ in range(EPOCHS)]
    )


def main():
    special = {"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]"}
    words = [*special.values(), *(f"word{i}" for i in range(200))]
    vocabulary = {word: i for i, word in enumerate(words)}
    model = models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **special)
    is_as_described = True
    for seed, options in (
        (None, {}),
        (None, {"num_workers": 2}),
        (0, {}),
        (0, {"num_workers": 2}),
        (0, {"num_workers": 2, "persistent_workers": True}),
    ):
        masks = masks_of(tokenizer, seed, **options)
        different = len({tuple(mask.flatten().tolist()) for mask in masks})
        predicted = masks.any(0).float().mean().item()
        print(
            f"seed={seed}, {options or 'no workers'}: {different} different masks in {EPOCHS} "
            f"epochs, which predict {predicted:.0%} of the tokens"
        )
        if seed == 0 and options == {"num_workers": 2}:
            is_as_described &= different == 1 and predicted < 0.2
        else:
            is_as_described &= different == EPOCHS and predicted > 0.9
    sys.exit(0 if is_as_described else "the masks of epochs with a seed have changed")


if __name__ == "__main__":
    main()
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
