#!/usr/bin/env bash
# trl 1.16.0: CPOConfig's alpha, for the rewards (1 - p^-alpha) / alpha of AlphaPO (2501.03884),
# "works with all loss types". But of "sigmoid", the default, and "hinge" p is a whole completion's
# probability, and CPOTrainer computes it first: exp(-104) and less are 0 in fp32, so that from some
# tens of tokens on p^-alpha is infinite, or 0 for a negative alpha. The loss is NaN, or log(2)
# whatever the model, and after one step all parameters are NaN. By exp(-alpha * log p) the same
# rewards are of usual size. No error, no warning, and the logged loss is 0 or log(2); with alpha=0,
# with short completions, and with "simpo", which takes the mean over tokens, the loss is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 trl==1.16.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import math
import random
import sys
import warnings
from pathlib import Path

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.cpo import CPOConfig, CPOTrainer

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
datasets.disable_progress_bars()
torch.set_num_threads(1)
folder = Path(sys.argv[1])
BETA = 0.1

words = ["<pad>", "<eos>", *(f"w{i}" for i in range(40))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
)


def text(length):
    return " ".join(random.choices(words[2:], k=length))


def results(loss_type, alpha, length):
    """Return the trainer's loss, that by hand, and whether parameters are finite after a step."""
    random.seed(0)
    rows = [
        {"prompt": text(3) + " ", "chosen": text(length), "rejected": text(length)}
        for _ in range(4)
    ]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, initializer_range=0.1, pad_token_id=0, eos_token_id=1,
            bos_token_id=None,
        )
    )
    trainer = CPOTrainer(
        model,
        args=CPOConfig(
            output_dir=folder / "runs", per_device_train_batch_size=4, use_cpu=True, bf16=False,
            report_to=[], disable_tqdm=True, max_steps=1, gradient_checkpointing=False,
            save_strategy="no", beta=BETA, cpo_alpha=0.0, simpo_gamma=0.0, loss_type=loss_type,
            alpha=alpha,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        loss = trainer.compute_loss(model, batch).item()
        log_p = [p.double() for p in trainer.concatenated_forward(model, batch)[:2]]
    rewards = [p if alpha == 0 else -torch.expm1(-alpha * p) / alpha for p in log_p]
    by_hand = -logsigmoid(BETA * (rewards[0] - rewards[1])).mean().item()
    trainer.train()
    return loss, by_hand, all(p.isfinite().all().item() for p in model.parameters())


is_as_described = True
for loss_type, alpha, length in (
    ("sigmoid", 0.0, 60),
    ("sigmoid", 0.01, 10),
    ("sigmoid", 0.01, 60),
    ("sigmoid", -0.01, 60),
    ("simpo", 0.01, 60),
):
    loss, by_hand, finite = results(loss_type, alpha, length)
    print(f"{loss_type}, alpha {alpha}, {length} tokens: loss {loss:.5f}, by hand", end=" ")
    print(f"{by_hand:.5f}, parameters {'finite' if finite else 'NaN'} after a step")
    is_lost = loss_type == "sigmoid" and alpha != 0 and length == 60
    is_as_described &= finite != is_lost and 0.3 < by_hand < 2.0
    if is_lost:
        is_as_described &= math.isnan(loss) if alpha > 0 else abs(loss - math.log(2)) < 1e-6
    else:
        is_as_described &= abs(loss - by_hand) < 1e-4
sys.exit(0 if is_as_described else "the loss is no longer NaN")
PROGRAM
HF_HOME="$folder/home" HF_HUB_OFFLINE=1 TQDM_DISABLE=1 TOKENIZERS_PARALLELISM=false \
    TRL_EXPERIMENTAL_SILENCE=1 "$folder/venv/bin/python" "$folder/program.py" "$folder"
