#!/usr/bin/env bash
# megatron-core 0.16.1 (0.19.2, which needs Python 3.12, has the same code): moe_input_jitter_eps
# adds noise to a router's input as in Switch Transformers (2101.03961), which its code refers to.
# There the noise is of training alone. Here it stays in evaluation mode: the same tokens get other
# weights of experts, and other experts, on each call. So validation losses, log-probabilities and
# generated tokens are random. No error, no warning; without it two calls are the same.
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
is_as_described = True
for eps in (None, 0.1):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=1,
        num_moe_experts=16,
        moe_router_topk=2,
        moe_input_jitter_eps=eps,
        add_bias_linear=False,
    )
    router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight)
    hidden = torch.randn(1000, 1, 64)
    router.eval()
    with torch.no_grad():
        (weights, experts), (weights_again, experts_again) = router(hidden), router(hidden)
    moved = (experts != experts_again).any(1).sum().item()
    change = (weights - weights_again).abs().max().item()
    print(f"evaluation, jitter {eps}: of 1000 tokens {moved} have other experts in a second call,")
    print(f"    and weights differ by up to {change:.3f}")
    is_as_described &= moved == 0 and change == 0.0 if eps is None else moved > 20 and change > 0.1
dist.destroy_process_group()
sys.exit(0 if is_as_described else "evaluation is no longer random")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 1 \
    "$folder/program.py"
