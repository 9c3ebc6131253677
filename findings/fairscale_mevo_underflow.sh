#!/usr/bin/env bash
# fairscale 0.4.13: MEVO, its fused output layer and cross-entropy in tiles, takes the logarithm of
# exp(logit - max) / sum rather than logit - max - log(sum). So a token whose label's logit is about
# 103 below the largest makes the loss infinite and all gradients NaN. It is meant for a weight
# shared with an embedding: nn.Embedding's own initial weights and 512 normalized hidden features
# get there in the first step. F.cross_entropy of the same numbers is finite.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 fairscale==0.4.13
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from fairscale.experimental.nn import MEVO  # noqa: E402

tokens, vocab_size = 128, 1000
is_as_described = True
for hidden_size, is_finite in ((64, True), (512, False)):
    torch.manual_seed(0)
    weight = torch.nn.Embedding(vocab_size, hidden_size).weight
    hidden = F.layer_norm(torch.randn(1, tokens, hidden_size), (hidden_size,)).requires_grad_()
    labels = torch.randint(vocab_size, (1, tokens))
    loss = MEVO(weight, tile_factor=4, reduction="mean")(hidden, labels)
    loss.backward()
    logits = hidden[0].detach() @ weight.detach().T
    gap = (logits.amax(-1) - logits.gather(-1, labels[0][:, None])[:, 0]).max().item()
    exact = hidden.detach()[0].requires_grad_()
    expected = F.cross_entropy(exact @ weight.detach().T, labels[0])
    expected.backward()
    of_hidden, of_weight = hidden.grad.isnan().any().item(), weight.grad.isnan().any().item()
    print(f"{hidden_size} features, labels' logits at most {gap:.1f} below the largest")
    print(f"    F.cross_entropy {expected:.4f}, NaN gradients: {exact.grad.isnan().any().item()}")
    print(f"    MEVO            {loss:.4f}, NaN gradients: {of_hidden} and {of_weight}")
    is_as_described &= bool(expected.isfinite()) and not exact.grad.isnan().any().item()
    if is_finite:
        is_as_described &= abs(loss.item() - expected.item()) < 1e-3
        is_as_described &= torch.allclose(hidden.grad[0], exact.grad, atol=1e-5)
    else:
        is_as_described &= loss.item() == float("inf") and of_hidden and of_weight
sys.exit(0 if is_as_described else "MEVO is now finite where cross-entropy is")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
