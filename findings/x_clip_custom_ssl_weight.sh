#!/usr/bin/env bash
# x-clip 0.14.4: a self-supervised module that is passed to CLIP as visual_ssl, as the README's
# example does, is run and its loss multiplied by 0: image_ssl_loss_weight counts only with
# use_visual_ssl=True, which the example does not pass and which is to choose a built-in module. The
# module's parameters get gradients of exactly 0. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.7.0 torchvision==0.22.0 numpy==2.2.6 x-clip==0.14.4
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from x_clip import CLIP


class Reconstruction(torch.nn.Module):
    """Takes images and returns a loss."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return (images - self.scale * images).square().mean()


def run(image_ssl_loss_weight, **options):
    """Return the loss, the module's calls and the gradient of its parameter."""
    torch.manual_seed(0)
    module = Reconstruction()
    clip = CLIP(
        dim_text=32,
        dim_image=32,
        dim_latent=16,
        num_text_tokens=64,
        text_enc_depth=1,
        text_seq_len=8,
        text_heads=2,
        visual_enc_depth=1,
        visual_image_size=32,
        visual_patch_size=16,
        visual_patch_dropout=0.0,
        visual_heads=2,
        visual_ssl=module,
        image_ssl_loss_weight=image_ssl_loss_weight,
        **options,
    )
    torch.manual_seed(1)
    loss = clip(torch.randint(1, 64, (4, 8)), torch.randn(4, 3, 32, 32), return_loss=True)
    loss.backward()
    return loss.item(), module.calls, module.scale.grad.item()


found = {}
for options in ({}, {"use_visual_ssl": True}):
    for weight in (0.05, 0.5):
        loss, calls, gradient = run(weight, **options)
        found[bool(options), weight] = loss, gradient
        print(f"visual_ssl=module, image_ssl_loss_weight={weight}, {options or 'nothing else'}:")
        print(f"    loss {loss:.4f}, calls of the module {calls}, its gradient {gradient:.4f}")
is_as_described = found[False, 0.05] == found[False, 0.5] and found[False, 0.5][1] == 0
is_as_described &= found[True, 0.05][0] != found[True, 0.5][0]
is_as_described &= abs(found[True, 0.5][1]) > 0.1
sys.exit(0 if is_as_described else "the module's loss counts now")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
