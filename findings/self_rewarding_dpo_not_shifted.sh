#!/usr/bin/env bash
# self-rewarding-lm-pytorch 0.2.12: DPO (arXiv 2305.18290) and SPIN (2401.01335) take the
# probability of a token from the logits at its own place, which are those of the token after it. So
# they train how likely a model repeats each token that it has just read, not what it says next. The
# package's supervised finetuning does shift labels by one. No error, no warning; the loss goes
# down. Of a model that knows each next token for sure, the likelihood of the right text comes out
# as 0.
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
import torch.nn.functional as F

warnings.simplefilter("ignore")
from self_rewarding_lm_pytorch import DPO, SPIN  # noqa: E402
from self_rewarding_lm_pytorch.dpo import log_prob_from_model_and_seq  # noqa: E402

VOCAB_SIZE, LENGTH, PROMPT = 30, 12, 4


class Bigrams(torch.nn.Module):
    """Logits of the next token, by the token."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(VOCAB_SIZE, VOCAB_SIZE)
        torch.nn.init.zeros_(self.table.weight)

    def forward(self, tokens):
        return self.table(tokens)


def texts(step, count=16):
    """Return tokens that go up by step from a random one."""
    torch.manual_seed(0)
    start = torch.randint(VOCAB_SIZE, (count, 1))
    return (start + step * torch.arange(LENGTH)) % VOCAB_SIZE


def probabilities(model):
    """Return how likely the model's next token is the same, one up and two up."""
    table = model.table.weight.softmax(-1)
    rows = torch.arange(VOCAB_SIZE)
    return [table[rows, (rows + step) % VOCAB_SIZE].mean().item() for step in (0, 1, 2)]


def own_dpo(model, preferred, other):
    """Return the loss of DPO against a uniform reference, which drops out of it."""
    sums = []
    for tokens in (preferred, other):
        log_probabilities = model(tokens[:, :-1]).log_softmax(-1)
        chosen = log_probabilities.gather(-1, tokens[:, 1:, None])[..., 0]
        sums.append(chosen[:, PROMPT - 1 :].mean(-1))
    return -F.logsigmoid(0.1 * (sums[0] - sums[1])).mean()


sure = Bigrams()
sure.table.weight.data = 40 * torch.eye(VOCAB_SIZE).roll(1, 1)
right = log_prob_from_model_and_seq(sure, texts(1)).mean().item()
expected = sure(texts(1)[:, :-1]).log_softmax(-1).gather(-1, texts(1)[:, 1:, None]).mean().item()
print(f"mean log-probability of what a sure model says: {right:.1f}, expected {expected:.1f}")
is_as_described = right < -39 and expected > -1e-3

up_by_one, up_by_two = texts(1), texts(2)
prompt_len = torch.full((16,), PROMPT)
for name in ("own DPO", "DPO", "SPIN"):
    model = Bigrams()
    if name == "own DPO":
        loss_of = lambda: own_dpo(model, up_by_one, up_by_two)  # noqa: E731
    elif name == "DPO":
        dpo = DPO(model, beta=0.1)
        loss_of = lambda: dpo(up_by_one.clone(), up_by_two.clone(), prompt_len)  # noqa: E731
    else:
        spin = SPIN(model)
        loss_of = lambda: spin(up_by_two.clone(), up_by_one.clone(), prompt_len)  # noqa: E731
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(200):
        loss = loss_of()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    same, one, two = probabilities(model)
    print(f"{name}, one up preferred to two up: loss {losses[0]:.3f} -> {losses[-1]:.3f};", end=" ")
    print(f"next token the same {same:.3f}, one up {one:.3f}, two up {two:.3f}")
    if name == "own DPO":
        is_as_described &= one > 2 * two
    else:
        is_as_described &= abs(one - two) < 0.1 * two and losses[-1] < losses[0]
sys.exit(0 if is_as_described else "DPO and SPIN now read the logits of the place before")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
