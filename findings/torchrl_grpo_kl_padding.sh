#!/usr/bin/env bash
# torchrl 0.14.1: GRPOLoss averages its objective and its entropy over the tokens that the mask
# leaves, but its KL divergence to the reference (kl_to_ref_coeff, and kl_to_inference_coeff
# likewise) over all positions: those of prompt and padding are set to zero and counted. So they
# weaken the coefficient: of the same responses padded to twice the length, the KL loss and its
# gradient are half as large. No warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 \
    tensordict==0.14.3 torchrl==0.14.1
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

import tokenizers
import torch

warnings.filterwarnings("ignore")
logging.disable()
from tensordict import TensorDict  # noqa: E402
from torchrl.modules.llm import TransformersWrapper  # noqa: E402
from torchrl.objectives.llm import GRPOLoss  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

torch.manual_seed(0)
words = tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w1")
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(words), pad_token="w0", unk_token="w1"
)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).eval()
actor = TransformersWrapper(
    model,
    tokenizer=tokenizer,
    input_mode="tokens",
    generate=False,
    pad_output=True,
    return_log_probs=True,
)
tokens = torch.randint(3, 32, (4, 6))
reference = -4 * torch.rand(4, 6) - 1
advantage = torch.randn(4, 1, 1).expand(4, 6, 1)
attended = torch.ones(4, 6, dtype=torch.bool)
in_response = attended.clone()
in_response[:, :2] = False


def padded(tensor, amount):
    return torch.cat([tensor.new_zeros(4, amount, *tensor.shape[2:]), tensor], 1)


def of_batch(**tensors):
    return TensorDict(**tensors, batch_size=4)


def losses(amount):
    """Return the losses of the batch with so much padding on the left."""
    data = of_batch(
        tokens=of_batch(full=padded(tokens, amount)),
        masks=of_batch(
            all_attention_mask=padded(attended, amount),
            all_assistant_mask=padded(in_response, amount),
        ),
        next=of_batch(ref_log_probs=of_batch(full=padded(reference, amount))),
        advantage=padded(advantage, amount),
    )
    with torch.no_grad():
        data["log_probs"] = of_batch(full=actor(data.clone())["log_probs", "full"])
    loss = GRPOLoss(actor, masking_strategy="rlhf", kl_to_ref_coeff=1.0)
    result = loss(data)
    model.zero_grad()
    result.loss_kl_to_ref.backward()
    gradient = model.lm_head.weight.grad.norm().item()
    kept = data["log_probs", "full"][padded(in_response, amount)]
    difference = reference[in_response] - kept
    expected = (difference.exp() - 1 - difference).mean().item()
    objective = result.loss_objective.item()
    return objective, result.loss_entropy.item(), result.loss_kl_to_ref.item(), gradient, expected


first = losses(0)
print("4 sequences of 2 tokens of prompt and 4 of response, padded on the left")
is_as_described = abs(first[2] - first[4] * 4 / 6) < 1e-4
for amount in (0, 6, 18):
    objective, entropy, kl, gradient, expected = losses(amount)
    print(f"{amount:2} of padding: objective {objective:.4f}, entropy {entropy:.4f},", end=" ")
    print(f"KL {kl:.4f} (of the responses {expected:.4f}), its gradient {gradient:.4f}")
    is_as_described &= abs(objective - first[0]) < 1e-4 and abs(entropy - first[1]) < 1e-4
    is_as_described &= abs(expected - first[4]) < 1e-4
    shrunk = 6 / (6 + amount)
    is_as_described &= abs(kl - first[2] * shrunk) < 1e-4
    is_as_described &= abs(gradient - first[3] * shrunk) < 1e-4
sys.exit(0 if is_as_described else "the KL divergence no longer depends on padding")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
