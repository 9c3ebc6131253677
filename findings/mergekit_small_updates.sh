#!/usr/bin/env bash
# mergekit 0.1.5: two merge methods that do not depend on the size of the updates, by their papers,
# change where these are small, as those of a usual fine-tuning. SCE weights models by the mean
# squares of their updates, but all alike if these sum up to less than 1e-6 (updates of about 7e-4).
# Model Stock takes a product of two norms below 1e-6 for 1e-6, and so updates that agree for
# orthogonal ones: it keeps the base. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 \
    mergekit==0.1.5
cat > "$folder/program.py" <<'PROGRAM'
import logging
import pathlib
import sys
import tempfile
import warnings

import torch
from safetensors.torch import load_file

warnings.filterwarnings("ignore")
logging.disable()
from mergekit.config import MergeConfiguration  # noqa: E402
from mergekit.merge import run_merge  # noqa: E402
from mergekit.options import MergeOptions  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

disable_progress_bar()
NAME = "model.layers.0.self_attn.q_proj.weight"
config = LlamaConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    dtype="float32",
)
torch.manual_seed(0)
base = LlamaForCausalLM(config)
shared = [torch.randn_like(parameter) for parameter in base.parameters()]
own = [[torch.randn_like(parameter) for parameter in base.parameters()] for _ in range(2)]


def merged(folder, method, size, **parameters):
    """Return the updates of one weight, of both models and of their merge, in float64."""
    paths = [f"{folder}/base", f"{folder}/first", f"{folder}/second"]
    base.save_pretrained(paths[0])
    for path, factor, noise in zip(paths[1:], (1, 3), own, strict=True):
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter, origin, common, difference in zip(
                model.parameters(), base.parameters(), shared, noise, strict=True
            ):
                parameter.copy_(origin + size * factor * (common + difference) / 2**0.5)
        model.save_pretrained(path)
    description = {
        "merge_method": method,
        "base_model": paths[0],
        "models": [{"model": path} for path in paths[1:]],
        "parameters": parameters,
        "dtype": "float32",
    }
    configuration = MergeConfiguration.model_validate(description)
    options = MergeOptions(quiet=True, write_model_card=False)
    run_merge(configuration, f"{folder}/merged", options)
    tensors = []
    for path in (*paths, f"{folder}/merged"):
        file = next(pathlib.Path(path).glob("*.safetensors"))
        tensors.append(load_file(file)[NAME].double())
    return [tensor - tensors[0] for tensor in tensors[1:]]


def share_of_second(folder, size):
    """Return the second model's share by SCE, where signs agree, and what its formula gives."""
    first, second, result = merged(folder, "sce", size)
    agree = first.sign() == second.sign()
    slope = (second - first)[agree]
    share = ((result - first)[agree] * slope).sum() / slope.square().sum()
    squares = first.square().mean(), second.square().mean()
    return share.item(), (squares[1] / sum(squares)).item()


def ratio_of_stock(folder, size):
    """Return how far Model Stock goes to the average, over its rows, and what its formula gives."""
    first, second, result = merged(folder, "model_stock", size, filter_wise=True)
    average = (first + second) / 2
    ratio = (result * average).sum(1) / average.square().sum(1)
    cosine = torch.cosine_similarity(first, second, dim=1, eps=1e-300)
    return ratio.mean().item(), (2 * cosine / (1 + cosine)).mean().item()


found = {}
for size in (1e-2, 1e-3, 1e-4, 1e-5):
    with tempfile.TemporaryDirectory() as folder:
        share, expected_share = share_of_second(folder, size)
    with tempfile.TemporaryDirectory() as folder:
        ratio, expected_ratio = ratio_of_stock(folder, size)
    found[size] = share - expected_share, ratio - expected_ratio
    print(f"updates of {size:.0e} and three times as much:")
    print(f"    SCE: {share:.3f} of the second model (by its formula {expected_share:.3f})")
    print(f"    Model Stock: {ratio:.3f} of the average (by its formula {expected_ratio:.3f})")
is_as_described = max(map(abs, found[1e-2])) < 0.01
is_as_described &= found[1e-4][0] < -0.3 and found[1e-5][1] < -0.3
sys.exit(0 if is_as_described else "small updates are merged as large ones are")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
