#!/usr/bin/env bash
# opacus 1.6.0: GradSampleModule's gradients of nn.Embedding do not leave out padding_idx, so DP-SGD
# trains the padding's vector, which PyTorch keeps fixed ("not updated during training"), and
# padding counts in each sample's norm, here too in ghost clipping: a sample with much padding is
# clipped although its gradient is below max_grad_norm. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 opacus==1.6.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer

warnings.filterwarnings("ignore")
logging.disable()
padding, batch_size, length = 0, 4, 10
torch.manual_seed(0)
tokens = torch.randint(1, 12, (batch_size, length))
for row, used in enumerate((10, 6, 4, 2)):
    tokens[row, used:] = padding
targets = torch.randn(batch_size, length, 3, dtype=torch.float64)


def make_model():
    torch.manual_seed(1)
    return torch.nn.Embedding(12, 3, padding_idx=padding).double()


def losses(model):
    return ((model(tokens) - targets) ** 2).mean((1, 2))


def norms_of_samples():
    """Return the norm of each sample's gradient, by autograd."""
    norms = []
    for row in range(batch_size):
        model = make_model()
        losses(model)[row].backward()
        norms.append(model.weight.grad.norm())
    return torch.stack(norms)


plain = make_model()
losses(plain).mean().backward()
plain_step = -0.1 * plain.weight.grad

wrapped = GradSampleModule(make_model())
start = wrapped._module.weight.detach().clone()
optimizer = DPOptimizer(
    torch.optim.SGD(wrapped.parameters(), lr=0.1),
    noise_multiplier=0.0,
    max_grad_norm=1e6,
    expected_batch_size=batch_size,
)
losses(wrapped).mean().backward()
norms = wrapped._module.weight.grad_sample.flatten(1).norm(dim=1)
optimizer.step()
private_step = (wrapped._module.weight - start).detach()

ghost = GradSampleModuleFastGradientClipping(make_model(), max_grad_norm=1e6)
losses(ghost).mean().backward()
ghost_norms = ghost.get_norm_sample()

expected = norms_of_samples()
error = (private_step - plain_step).abs().max(dim=1).values
moved = private_step[padding].norm().item()
print("a step without noise or clipping:")
print(f"    the padding's vector moves by {moved:.4f}, in PyTorch by", end=" ")
print(f"{plain_step[padding].norm().item():.4f};", end=" ")
print(f"others differ by {error[1:].max().item():.1e}")
print("norms of the samples' gradients, with 0, 4, 6 and 8 tokens of padding:")
for name, numbers in (("autograd", expected), ("opacus", norms), ("ghost", ghost_norms)):
    print(f"    {name:9}", " ".join(f"{number:.4f}" for number in numbers))
is_as_described = moved > 1e-3 and plain_step[padding].norm() == 0 and error[1:].max() < 1e-9
is_as_described &= bool(((norms - expected)[1:] > 0.01).all())
is_as_described &= bool(((norms - expected)[0].abs() < 1e-9).all())
is_as_described &= torch.allclose(ghost_norms, norms)
sys.exit(0 if is_as_described else "padding no longer has a gradient")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
