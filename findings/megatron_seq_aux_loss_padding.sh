#!/usr/bin/env bash
# megatron-core 0.16.1 (0.19.2, which needs Python 3.12, has the same code): the load balancing type
# "seq_aux_loss" is, by its docstring, the average of the sequences' own losses. With a
# padding_mask, which is to leave padding out, it divides each sequence's sums by the square of the
# mean number of tokens of all, where the sequence's own number belongs (DeepSeek-V3, 2412.19437).
# So a sequence of 8 tokens beside one of 56 has 1/16 of its loss and gradient, and the other 3.1
# times as much. Sequences of one length are right, padded or not. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 megatron-core==0.16.1
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

import torch
import torch.distributed as dist

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.current_device = lambda: "cpu"
moe_utils.te_general_gemm = None  # without Transformer Engine it is not defined
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel()
LENGTH, HIDDEN, EXPERTS, TOP_K = 64, 16, 4, 2
config = TransformerConfig(
    num_layers=1,
    hidden_size=HIDDEN,
    num_attention_heads=1,
    num_moe_experts=EXPERTS,
    moe_router_topk=TOP_K,
    moe_router_load_balancing_type="seq_aux_loss",
    moe_aux_loss_coeff=1.0,
    add_bias_linear=False,
)
torch.manual_seed(0)
router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
router.set_layer_number(1)
torch.nn.init.normal_(router.weight)
sequences = torch.randn(2, LENGTH, HIDDEN)


def gradients_of_router(lengths):
    """Return the gradient of the balancing loss of each of the two sequences' tokens."""
    hidden = sequences.transpose(0, 1).contiguous().requires_grad_()
    padding_mask = torch.arange(LENGTH)[:, None] >= torch.tensor(lengths)
    probs, _ = router(hidden, padding_mask)
    (probs * 0).sum().backward()  # of the balancing loss alone
    return hidden.grad.transpose(0, 1)


def gradients_by_definition(lengths):
    """Return the gradient of the mean of the sequences' losses."""
    hidden = sequences.clone().requires_grad_()
    loss = 0.0
    for sequence, length in zip(hidden, lengths):
        scores = (sequence[:length] @ router.weight.T).softmax(-1)
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(TOP_K).indices, 1.0)
        loss = loss + EXPERTS * (chosen.mean(0) / TOP_K * scores.mean(0)).sum() / len(lengths)
    loss.backward()
    return hidden.grad


is_as_described = True
for lengths in ((64, 64), (32, 32), (56, 8)):
    computed, expected = gradients_of_router(lengths), gradients_by_definition(lengths)
    mean = sum(lengths) / 2
    for row, length in enumerate(lengths):
        times = (computed[row].norm() / expected[row].norm()).item()
        print(f"sequences of {lengths}: gradient of that of {length} is {times:.4f} times its own")
        described = (length / mean) ** 2 * expected[row]
        is_as_described &= torch.allclose(computed[row], described, rtol=1e-3, atol=1e-7)
dist.destroy_process_group()
sys.exit(0 if is_as_described else "each sequence's loss is now divided by its own tokens")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 1 \
    "$folder/program.py"
