#!/usr/bin/env bash
# x-transformers 2.31.10: DPO lays its masks over log-probabilities one token too early: those of
# tokens 1 to n take the mask of tokens 0 to n - 1. So the first token of each answer does not
# count, and where an answer is padded, the first token of padding does, with all masks right. No
# error, no warning; the loss is that of answers cut off at the front.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 x-transformers==2.31.10
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from x_transformers.dpo import DPO

words, pad, beta = 10, 0, 0.1
prompt, length = 3, 8
torch.manual_seed(0)
preferred = torch.tensor([[4, 5, 6, 1, 2, 3, 0, 0], [7, 8, 9, 3, 1, 2, 4, 5]])
rejected = torch.tensor([[4, 5, 6, 9, 0, 0, 0, 0], [7, 8, 9, 2, 2, 0, 0, 0]])
prompt_mask = (torch.arange(length) < prompt).expand(2, length)


class Bigrams(torch.nn.Module):
    """Score the next word by this one alone, and keep the logits."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(words, words).double()
        self.kept = []

    def forward(self, tokens):
        logits = self.table(tokens)
        if logits.requires_grad:
            logits.retain_grad()
            self.kept.append(logits)
        return logits


def mean_log_probabilities(table, tokens, counted):
    log_probabilities = table(tokens[:, :-1]).log_softmax(-1)
    chosen = log_probabilities.gather(-1, tokens[:, 1:, None])[..., 0]
    return (chosen * counted).sum(1) / counted.sum(1)


def expected_loss(policy, reference, shift):
    """Compute the loss with the masks of the tokens predicted (1), or of those before them (0)."""
    ratios = []
    for tokens in (preferred, rejected):
        answer = ~prompt_mask & (tokens != pad)
        counted = answer[:, 1:] if shift else answer[:, :-1]
        tables = (policy.table, reference.table)
        chosen = [mean_log_probabilities(table, tokens, counted) for table in tables]
        ratios.append(chosen[0] - chosen[1])
    return -torch.nn.functional.logsigmoid(beta * (ratios[0] - ratios[1])).mean()


model = Bigrams()
dpo = DPO(model, beta=beta, pad_id=pad)
with torch.no_grad():
    model.table.weight += torch.randn_like(model.table.weight)
loss = dpo(preferred, rejected, prompt_mask=prompt_mask)
loss.backward()
right = expected_loss(model, dpo.ref_model, shift=1).item()
early = expected_loss(model, dpo.ref_model, shift=0).item()
print(f"loss {loss.item():.6f}, with masks of the tokens predicted {right:.6f},", end=" ")
print(f"with those one token too early {early:.6f}")
counting = {}
answers = (("preferred", preferred), ("rejected", rejected))
for (name, tokens), logits in zip(answers, model.kept, strict=True):
    for row in range(2):
        has_gradient = logits.grad[row].abs().sum(-1) > 0
        counting[name, row] = (has_gradient.nonzero().flatten() + 1).tolist()
        answer = (~prompt_mask & (tokens != pad))[row].nonzero().flatten().tolist()
        print(f"    {name} {row}: tokens {counting[name, row]} count, the answer is {answer}")
is_as_described = abs(loss.item() - early) < 1e-9 and abs(loss.item() - right) > 1e-4
is_as_described &= counting["preferred", 0] == [4, 5, 6]
is_as_described &= counting["preferred", 1] == [4, 5, 6, 7]
is_as_described &= counting["rejected", 0] == [4] and counting["rejected", 1] == [4, 5]
sys.exit(0 if is_as_described else "masks are now those of the tokens predicted")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
