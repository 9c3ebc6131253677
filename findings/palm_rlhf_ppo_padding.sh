#!/usr/bin/env bash
# palm-rlhf-pytorch 0.8.0: RLHFTrainer (PPO) takes the mean of the policy loss over all positions,
# also over those behind a response that ended early. There the old log-probability is the 0 that
# pads it, so the ratio is the probability of padding, token 0: the first loss is not that of ratios
# of 1, and the model learns to write token 0 behind good responses. No error, no warning. Responses
# of one length are right; entropy and divergence are masked, and so is the loss in its grpo.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 palm-rlhf-pytorch==0.8.0 \
    accelerate==1.15.0 adam-atan2-pytorch==0.4.1 hl-gauss-pytorch==0.3.0
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch
from palm_rlhf_pytorch import PaLM, RewardModel, RLHFTrainer
from palm_rlhf_pytorch.ppo import Memory

warnings.simplefilter("ignore")
PROMPT = torch.tensor([5, 6, 7, 8])


def log_probabilities(model, sequence):
    """Return log-probabilities [length, vocabulary], those of token t in row t."""
    logits, values = model(sequence[None], mask=(torch.arange(len(sequence)) >= len(PROMPT))[None])
    first = torch.zeros(1, logits.shape[-1])
    return torch.cat([first, logits[0, :-1]]).log_softmax(-1), values[0]


@torch.no_grad()
def remember(model, response, reward):
    sequence = torch.cat([PROMPT, response])
    log_probability, values = log_probabilities(model, sequence)
    chosen = log_probability.gather(-1, sequence[:, None])[:, 0]
    is_prompt = torch.arange(len(sequence)) < len(PROMPT)
    return Memory(
        sequence, is_prompt, torch.ones_like(is_prompt), log_probability.exp(),
        chosen[len(PROMPT) :], torch.tensor(reward), values,
    )


def learn(lengths):
    """Return the policy loss of the first update and the odds of token 0 before and after 150.

    The first half of the responses is good, the other bad; odds are behind the first response.
    """
    torch.manual_seed(0)
    palm = PaLM(num_tokens=32, dim=32, depth=1, heads=2, dim_head=16)
    trainer = RLHFTrainer(
        palm=palm, reward_model=RewardModel(palm), prompt_token_ids=PROMPT[None], epochs=150,
        beta_s=0.0, kl_div_loss_weight=0.0, actor_lr=1e-3, actor_lora=False, critic_lora=False,
        accelerate_kwargs={"cpu": True},
    )
    model = trainer.actor_critic.eval()
    responses = [torch.randint(10, 32, (length,)) for length in lengths]
    rewards = [5.0 if index < len(lengths) // 2 else 0.0 for index in range(len(lengths))]
    memories = [
        remember(model, response, reward)
        for response, reward in zip(responses, rewards, strict=True)
    ]
    behind = torch.cat([PROMPT, responses[0], torch.zeros(1, dtype=torch.long)])
    odds, messages = [], []
    trainer.print = messages.append
    for do in (lambda: None, lambda: trainer.learn(memories)):
        do()
        with torch.no_grad():
            odds.append(log_probabilities(model.eval(), behind)[0][-1, 0].exp().item())
    losses = [float(text.split()[1]) for text in messages if text.startswith("policy_loss")]
    return losses[0], odds


is_as_described = True
for lengths in ((8, 8, 8, 8), (3, 3, 8, 8)):
    first_loss, odds = learn(lengths)
    print(f"responses of {lengths} tokens, two good, two bad")
    print(f"    first policy loss: {first_loss:.3f} (each ratio is 1, the advantages' mean is 0)")
    print(f"    behind the first, probability of token 0: {odds[0]:.3f} -> {odds[1]:.3f}")
    if len(set(lengths)) == 1:
        is_as_described &= abs(first_loss) < 1e-3 and odds[1] < 2 * odds[0]
    else:
        is_as_described &= first_loss > 0.1 and odds[1] > 4 * odds[0]
sys.exit(0 if is_as_described else "the policy loss no longer counts padding")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
