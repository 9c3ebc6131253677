#!/usr/bin/env bash
# torchrl 0.14.1: GRPOLoss documents reduction="none", "mean" and "sum", but ignores "sum": its
# losses are the means over tokens, as without it, so a sum over microbatches that is divided by
# their tokens is wrong. It heeds "none"; DistillationLoss and SFTLoss heed all three. No error, no
# warning.
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
attended = torch.ones(4, 6, dtype=torch.bool)
in_response = attended.clone()
in_response[:, :2] = False


def of_batch(**tensors):
    return TensorDict(**tensors, batch_size=4)


data = of_batch(
    tokens=of_batch(full=tokens),
    masks=of_batch(all_attention_mask=attended, all_assistant_mask=in_response),
    advantage=torch.randn(4, 1, 1).expand(4, 6, 1),
)
with torch.no_grad():
    data["log_probs"] = of_batch(full=actor(data.clone())["log_probs", "full"])


def losses(reduction):
    """Return the objective and the entropy's loss."""
    result = GRPOLoss(actor, masking_strategy="rlhf", reduction=reduction)(data)
    return result.loss_objective.detach(), result.loss_entropy.detach()


objectives, entropies = losses("none")
is_as_described = objectives.shape == (4, 6, 1)
kept = in_response.sum()
print(f"reduction=none: {tuple(objectives.shape)}, of {kept} tokens of response: sum ", end="")
print(f"{objectives.sum():.4f}, mean {objectives.sum() / kept:.4f}")
for reduction in (None, "mean", "sum"):
    objective, entropy = losses(reduction)
    print(f"reduction={reduction}: objective {objective:.4f}, entropy's {entropy:.4f}")
    is_as_described &= torch.allclose(objective, objectives.sum() / kept, atol=1e-5)
    is_as_described &= torch.allclose(entropy, entropies.sum() / kept, atol=1e-5)
is_as_described &= abs(objectives.sum() - objectives.sum() / kept) > 0.1
sys.exit(0 if is_as_described else "GRPOLoss now heeds reduction='sum'")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
