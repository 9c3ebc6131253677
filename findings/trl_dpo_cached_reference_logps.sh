#!/usr/bin/env bash
# trl 1.16.0: DPOTrainer with precompute_ref_log_probs=True keeps the reference model's sums of log
# probabilities in the data set's cache, under a name made of the data and the model's weights. But
# the sums also depend on ld_alpha, and on max_length with truncation_mode="keep_end". A later run
# over the same data set on disk that changes one of these takes the sums of the first run, and its
# loss compares different parts of the completions. No error, no warning; with the option off it is
# right, and so with a max_length and "keep_start", for which the data itself is filtered by it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 trl==1.16.0
cat > "$folder/program.py" <<'PROGRAM'
import random
import sys
import warnings
from pathlib import Path

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

warnings.simplefilter("ignore")
datasets.disable_progress_bars()
torch.set_num_threads(1)
folder = Path(sys.argv[1])

words = ["<pad>", "<eos>", *(f"w{i}" for i in range(40))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
)


def text(length):
    return " ".join(random.choices(words[2:], k=length))


random.seed(0)
rows = [
    {"prompt": text(3) + " ", "chosen": text(length), "rejected": text(14 - length)}
    for length in (4, 12, 6, 9)
]
datasets.Dataset.from_list(rows).save_to_disk(folder / "data")


def model(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=0.2, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def loss(**options):
    """Return the loss of the first batch, all four rows, of a trainer with these options."""
    trainer = DPOTrainer(
        model(1),
        ref_model=model(0),
        args=DPOConfig(
            output_dir=folder / "runs", per_device_train_batch_size=4, use_cpu=True, bf16=False,
            report_to=[], disable_tqdm=True, **options,
        ),
        train_dataset=datasets.load_from_disk(folder / "data"),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        return trainer.compute_loss(trainer.model, batch).item()


is_as_described = True
first = True
for options in (
    {"max_length": None},
    {"max_length": None, "ld_alpha": 0.2},
    {"max_length": 8, "truncation_mode": "keep_end"},
):
    expected = loss(**options)
    computed = loss(precompute_ref_log_probs=True, **options)
    print(f"{options}: a loss of {expected:.4f}, with precompute_ref_log_probs {computed:.4f}")
    difference = abs(computed - expected)
    is_as_described &= (difference < 1e-4) if first else (difference > 0.05)
    first = False
sys.exit(0 if is_as_described else "sums of another run are no longer taken from the cache")
PROGRAM
HF_HOME="$folder/home" HF_HUB_OFFLINE=1 TQDM_DISABLE=1 TOKENIZERS_PARALLELISM=false \
    "$folder/venv/bin/python" "$folder/program.py" "$folder"
