#!/usr/bin/env bash
# trl 1.16.0: f_alpha_divergence_coef of DPOTrainer is documented as the alpha of the regularizer
# u^-alpha of the f-DPO paper, whose score is (1 - u^-alpha) / alpha: reverse KL for alpha near 0,
# forward KL for 1. The trainer computes that of 1 - alpha, so that 1 is exactly the reverse KL, and
# values near 0 the forward one. Only the default, 0.5, is as documented. No error, no warning.
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
BETA = 0.3

words = ["<pad>", "<eos>", *(f"w{i}" for i in range(40))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
)


def text(length):
    return " ".join(random.choices(words[2:], k=length))


random.seed(0)
rows = [{"prompt": text(3) + " ", "chosen": text(3), "rejected": text(3)} for _ in range(4)]


def model(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=0.1, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def loss(**options):
    """Return the trainer's loss of the four rows."""
    trainer = DPOTrainer(
        model(1),
        ref_model=model(0),
        args=DPOConfig(
            output_dir=folder / "runs", per_device_train_batch_size=4, use_cpu=True, bf16=False,
            report_to=[], disable_tqdm=True, beta=BETA, **options,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        return trainer.compute_loss(trainer.model, batch).item()


def log_ratios(key):
    """Return log u, the policy's log-probability of each completion minus the reference's."""
    ratios = []
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor([prompt + tokenizer(row[key])["input_ids"] + [1]])
        sums = []
        for seed in (1, 0):
            with torch.no_grad():
                log_probs = model(seed)(ids).logits[0, :-1].double().log_softmax(-1)
            log_probs = log_probs.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :]
            sums.append(log_probs.sum())
        ratios.append(sums[0] - sums[1])
    return torch.stack(ratios)


chosen, rejected = log_ratios("chosen"), log_ratios("rejected")


def by_hand(alpha):
    """Return the loss with the score (1 - u^-alpha) / alpha, and log u for an alpha of 0."""
    scores = [
        log_u if alpha == 0 else (1 - torch.exp(-alpha * log_u)) / alpha
        for log_u in (chosen, rejected)
    ]
    return -torch.nn.functional.logsigmoid(BETA * (scores[0] - scores[1])).mean().item()


reverse, forward = loss(), loss(f_divergence_type="forward_kl")
print(f"reverse_kl: {reverse:.5f}, by hand {by_hand(0):.5f}")
print(f"forward_kl: {forward:.5f}, by hand {by_hand(1):.5f}")
is_as_described = abs(reverse - by_hand(0)) < 1e-4 and abs(forward - by_hand(1)) < 1e-4
is_as_described &= abs(reverse - forward) > 0.01
for alpha in (0.001, 0.25, 0.5, 0.75, 1.0):
    computed = loss(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=alpha)
    print(f"alpha_divergence, f_alpha_divergence_coef={alpha}: {computed:.5f},", end=" ")
    print(f"by hand {by_hand(alpha):.5f}, of 1 - alpha {by_hand(1 - alpha):.5f}")
    is_as_described &= abs(computed - by_hand(1 - alpha)) < 1e-4
    is_as_described &= (abs(computed - by_hand(alpha)) < 1e-4) == (alpha == 0.5)
sys.exit(0 if is_as_described else "f_alpha_divergence_coef no longer means 1 - alpha")
PROGRAM
HF_HOME="$folder/home" HF_HUB_OFFLINE=1 TQDM_DISABLE=1 TOKENIZERS_PARALLELISM=false \
    "$folder/venv/bin/python" "$folder/program.py" "$folder"
