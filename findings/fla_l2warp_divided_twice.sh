#!/usr/bin/env bash
# flash-linear-attention 0.6.0: use_l2warp, which RWKV-7 has on by default, adds the gradient of a
# penalty on the largest logits, "normalized by the full number of input tokens". If a model is
# given num_items_in_batch, as transformers' Trainer gives it to every model whose forward takes
# keyword arguments, the sum of losses is divided by it, and with it the penalty, which is a mean
# already. So its gradient is as many times too small as a forward has tokens: in training with
# Trainer it is as good as off. Without num_items_in_batch, and for the loss itself, all is right.
# No error, no warning. (Shown on a CPU in Triton's interpreter, of each kernel with the first of
# its configurations, and for the head's weight: other layers are not differentiated.)
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
import torch  # noqa: E402
from fla.models import RWKV7Config, RWKV7ForCausalLM  # noqa: E402

torch.set_num_threads(1)
ROWS, LENGTH, VOCAB_SIZE = 4, 17, 50
PREDICTED = ROWS * (LENGTH - 1)
torch.manual_seed(0)
ids = torch.randint(3, VOCAB_SIZE, (ROWS, LENGTH))


def train(num_items_in_batch, parts, **options):
    """Return the loss of the batch, in parts, and its gradient for the head's weight."""
    torch.manual_seed(1)
    config = RWKV7Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=2,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
        fuse_norm=False,
        fuse_cross_entropy=False,
        **options,
    )
    model = RWKV7ForCausalLM(config).float().eval()
    model.lm_head.weight.data.mul_(20)
    model.model.forward = torch.no_grad()(model.model.forward)
    total = 0.0
    for part in ids.chunk(parts):
        loss = model(
            part, labels=part, use_cache=False, num_items_in_batch=num_items_in_batch
        ).loss
        if num_items_in_batch is None:
            loss = loss / parts
        loss.backward()
        total += loss.item()
    return total, model.lm_head.weight.grad


is_as_described = True
for name, is_fused in (("cross_entropy", False), ("FusedLinearCrossEntropyLoss", True)):
    for parts in (1, 2):
        found = {}
        for num_items_in_batch in (None, PREDICTED):
            loss, gradient = train(
                num_items_in_batch, parts, fuse_linear_cross_entropy=is_fused
            )
            loss_without, gradient_without = train(
                num_items_in_batch, parts, fuse_linear_cross_entropy=is_fused, use_l2warp=False
            )
            assert loss == loss_without
            found[num_items_in_batch] = loss, gradient_without, gradient - gradient_without
        (loss, gradient, penalty), (loss_given, gradient_given, penalty_given) = found.values()
        ratio = penalty.norm().item() / penalty_given.norm().item()
        print(f"{name}, {parts} part(s), with num_items_in_batch={PREDICTED} and without: loss")
        print(f"    {loss_given:.4f} and {loss:.4f}, its gradient's norm", end=" ")
        print(f"{gradient_given.norm():.4f} and {gradient.norm():.4f}, the penalty's", end=" ")
        print(f"{penalty_given.norm():.6f} and {penalty.norm():.6f}, {ratio:.1f} times as much")
        is_as_described &= abs(loss - loss_given) < 1e-3
        is_as_described &= torch.allclose(gradient, gradient_given, atol=1e-5)
        is_as_described &= abs(ratio / (PREDICTED / parts) - 1) < 0.1
sys.exit(0 if is_as_described else "the penalty is no longer divided twice")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
