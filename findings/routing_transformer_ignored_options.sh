#!/usr/bin/env bash
# routing-transformer 1.6.1: RoutingTransformerLM takes commitment_factor ("the weight of the
# auxiliary loss", 1e-4 by default, in the README's part on hyperparameters) and hands it to nobody.
# The auxiliary loss, and what it makes of the model, is the same for any value; RoutingTransformer,
# in it, heeds it. ff_mult, context_window_size and use_absolute_pos_emb of the language model end
# the same way. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 routing-transformer==1.6.1 \
    local-attention==1.11.2
cat > "$folder/program.py" <<'PROGRAM'
import inspect
import math
import sys
import warnings

import torch
from routing_transformer import RoutingTransformer, RoutingTransformerLM

warnings.simplefilter("ignore")
sizes = {"dim": 32, "depth": 2, "heads": 2, "dim_head": 16, "max_seq_len": 64, "window_size": 16}


def auxiliary_loss(kind, commitment_factor):
    torch.manual_seed(0)
    options = {"num_tokens": 100} if kind is RoutingTransformerLM else {}
    model = kind(**sizes, **options, commitment_factor=commitment_factor)
    x = torch.randint(100, (2, 64)) if kind is RoutingTransformerLM else torch.randn(2, 64, 32)
    return model(x)[1].item()


def numbers_of(**options):
    """Return the number of parameters and the logits of a model with these options."""
    torch.manual_seed(0)
    model = RoutingTransformerLM(num_tokens=100, **sizes, **options)
    tokens = torch.randint(100, (2, 64))
    context = {"context": torch.randn(2, 64, 32)} if "receives_context" in options else {}
    torch.manual_seed(1)
    return sum(parameter.numel() for parameter in model.parameters()), model(tokens, **context)[0]


is_as_described = True
print("auxiliary loss, by commitment_factor:")
for kind in (RoutingTransformer, RoutingTransformerLM):
    losses = {factor: auxiliary_loss(kind, factor) for factor in (1e-4, 1e-2, 1.0)}
    numbers = ", ".join(f"{factor}: {loss:.2e}" for factor, loss in losses.items())
    print(f"    {kind.__name__:20} {numbers}")
    times = 1 if kind is RoutingTransformerLM else 1e4
    is_as_described &= math.isclose(losses[1.0], times * losses[1e-4], rel_tol=1e-3)
for name, values, others in (
    ("ff_mult", (4, 1), {}),
    ("context_window_size", (64, 8), {"receives_context": True}),
    ("use_absolute_pos_emb", (False, True), {}),
):
    (size, logits), (other_size, other_logits) = (
        numbers_of(**{name: value}, **others) for value in values
    )
    is_same = size == other_size and torch.equal(logits, other_logits)
    print(f"{name}={values[0]} and {values[1]}: {'the same logits' if is_same else 'different'}")
    is_as_described &= is_same and name in inspect.signature(RoutingTransformerLM).parameters
sys.exit(0 if is_as_described else "RoutingTransformerLM now heeds these options")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
