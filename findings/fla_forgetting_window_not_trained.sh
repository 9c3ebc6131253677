#!/usr/bin/env bash
# flash-linear-attention 0.6.0: window_size of the Forgetting Transformer reaches its layers, but
# these hand it to the cache alone and not to parallel_forgetting_attn, which takes it ("each query
# at position i only attends to keys in [i - window_size + 1, i]"). So training, evaluation and
# prompts attend to all tokens, as if no window were set; only tokens that are generated with a
# cache attend to the window, and get other logits than the model's forward gives them, with which
# it was trained. No error, no warning; without a window both are equal, and the Wall Transformer
# keeps to its window. (Shown on a CPU in Triton's interpreter, of each kernel with the first of
# its configurations.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 triton==3.7.1 \
    transformers==5.24.0 fla-core==0.6.0 flash-linear-attention==0.6.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
import triton  # noqa: E402

autotune = triton.autotune
triton.autotune = lambda configs, **options: autotune(
    configs[:1], **{name: value for name, value in options.items() if "prune" not in name}
)
import fla.models  # noqa: E402
import torch  # noqa: E402
from fla.ops.forgetting_attn import parallel_forgetting_attn  # noqa: E402

torch.set_num_threads(1)
LENGTH, PROMPT_LENGTH, WINDOW, VOCAB_SIZE = 12, 6, 4, 50
torch.manual_seed(0)
ids = torch.randint(3, VOCAB_SIZE - 1, (1, LENGTH))
other_ids = ids.clone()
other_ids[0, 0] += 1


def make(name, window_size):
    torch.manual_seed(1)
    config = getattr(fla.models, name + "Config")(
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=2,
        vocab_size=VOCAB_SIZE,
        window_size=window_size,
        fuse_cross_entropy=False,
        fuse_norm=False,
        fuse_swiglu=False,
    )
    model = getattr(fla.models, name + "ForCausalLM")(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(10)
    return model


def reached(first, second):
    """Return the positions at which two outputs differ."""
    return ((first - second).abs().amax(-1)[0] > 1e-4).nonzero().flatten().tolist()


def decode(model):
    """Return the logits of all tokens, those after the prompt one by one with a cache."""
    mask = torch.ones_like(ids)
    output = model(ids[:, :PROMPT_LENGTH], attention_mask=mask[:, :PROMPT_LENGTH], use_cache=True)
    logits = [output.logits]
    for end in range(PROMPT_LENGTH + 1, LENGTH + 1):
        output = model(
            ids[:, end - 1 : end],
            attention_mask=mask[:, :end],
            past_key_values=output.past_key_values,
            use_cache=True,
        )
        logits.append(output.logits)
    return torch.cat(logits, 1)


is_as_described = True
everywhere, within = list(range(LENGTH)), list(range(WINDOW))
with torch.no_grad():
    query, key, value = torch.randn(3, 1, LENGTH, 2, 16)
    other_value = value.clone()
    other_value[:, 0] += 1
    decay = -torch.rand(1, LENGTH, 2) / 10
    positions = reached(
        *(
            parallel_forgetting_attn(query, key, v, decay, window_size=WINDOW).flatten(2)
            for v in (value, other_value)
        )
    )
    print(f"parallel_forgetting_attn, window {WINDOW}: the first token is seen at {positions}")
    is_as_described &= positions == within
    for name, window_size in (
        ("WallTransformer", WINDOW),
        ("ForgettingTransformer", None),
        ("ForgettingTransformer", WINDOW),
    ):
        model = make(name, window_size)
        logits = model(ids, use_cache=False).logits
        positions = reached(logits, model(other_ids, use_cache=False).logits)
        print(f"{name}, window {window_size}: the first token is seen at {positions}")
        if name == "WallTransformer":
            is_as_described &= positions == within
            continue
        is_as_described &= positions == everywhere
        errors = (decode(model) - logits).abs().amax(-1)[0]
        print(f"    logits up to {logits.abs().max():.2f}: with a cache the prompt's", end=" ")
        print(f"are {errors[:PROMPT_LENGTH].max():.5f} from forward's, later ones", end=" ")
        print(f"{errors[PROMPT_LENGTH:].min():.5f} to {errors[PROMPT_LENGTH:].max():.5f}")
        is_as_described &= errors[:PROMPT_LENGTH].max().item() < 1e-4
        if window_size is None:
            is_as_described &= errors.max().item() < 1e-4
        else:
            is_as_described &= errors[PROMPT_LENGTH:].min().item() > 0.01
sys.exit(0 if is_as_described else "the Forgetting Transformer now keeps to its window")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
