#!/usr/bin/env bash
# infini-transformer-pytorch 0.2.1: InfiniTransformerWrapper.generate begins with the last segment
# of a prompt. Those before it are not compressed to memories, as they are in training and for
# tokens that it generates itself, but have no part in what follows: a long prompt is cut to its
# last segment, and another beginning gives the same tokens. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 infini-transformer-pytorch==0.2.1
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from infini_transformer_pytorch import InfiniTransformer, InfiniTransformerWrapper

words, segment, new = 50, 8, 6
torch.manual_seed(0)
model = InfiniTransformer(num_tokens=words, dim=32, depth=2, dim_head=16, heads=2)
for name, parameter in model.named_parameters():
    if name.endswith("head_gates"):
        torch.nn.init.zeros_(parameter)  # Look at memories as much as at the segment.
wrapper = InfiniTransformerWrapper(model, segment_length=segment).double().eval()

seen = []
model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))


def generate(prompt):
    """Generate tokens, and return them with all that the model was shown for the first."""
    seen.clear()
    torch.manual_seed(1)
    tokens = wrapper.generate(prompt=prompt, seq_len=prompt.shape[1] + new)
    return tokens[0].tolist(), seen[0].shape[1]


@torch.no_grad()
def next_logits(prompt):
    """Score the next token as training does: each segment with memories of those before it."""
    memories = None
    for part in prompt.split(segment, dim=1):
        logits, _, memories = model(part, past_memories=memories, return_new_memories=True)
    return logits[0, -1]


is_as_described = True
end = torch.randint(words, (1, segment // 2))
for before in (0, 2):
    beginnings = [torch.randint(words, (1, before * segment)) for _ in range(2)]
    prompts = [torch.cat((beginning, end), dim=1) for beginning in beginnings]
    (tokens, shown), (other_tokens, _) = [generate(prompt) for prompt in prompts]
    scores = [next_logits(prompt) for prompt in prompts]
    difference = (scores[0] - scores[1]).abs().max().item()
    print(f"two prompts of {prompts[0].shape[1]} tokens with one end, {shown} shown:", end=" ")
    print(f"{tokens} and {other_tokens};")
    print(f"    scores of the next token, as in training, differ by {difference:.1e}")
    is_as_described &= tokens == other_tokens and shown == segment // 2
    is_as_described &= difference > 1e-3 if before else difference == 0
sys.exit(0 if is_as_described else "all segments of a prompt are now compressed")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
