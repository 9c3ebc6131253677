#!/usr/bin/env bash
# speechbrain 1.1.2: kldiv_loss with label smoothing returns the sum over all tokens for
# reduction="mean", the default ("See pytorch for 'mean', 'sum'", says its docstring). Without
# smoothing it returns the mean: from label_smoothing=0 to 1e-6 a batch of 8 x 50 tokens has a loss
# and a gradient 400 times larger. With smoothing, length is ignored, too: what lies behind an
# utterance's end counts, unless its target is pad_idx. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 scipy==1.17.1 hyperpyyaml==1.2.3 \
    huggingface_hub==2.4.0 joblib==1.6.0 packaging==26.4 requests==2.34.2 tqdm==4.70.1
"$folder/venv/bin/pip" install --quiet --no-deps speechbrain==1.1.2
cat > "$folder/program.py" <<'PROGRAM'
import importlib.machinery
import sys
import types
from importlib.metadata import version

# the losses do not need torchaudio, which speechbrain imports
torchaudio = types.ModuleType("torchaudio")
torchaudio.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
torchaudio.__version__ = "2.11.0"
torchaudio.list_audio_backends = lambda: ["soundfile"]
sys.modules["torchaudio"] = torchaudio

import torch  # noqa: E402
from speechbrain.nnet.losses import kldiv_loss  # noqa: E402

print("torch", torch.__version__, "speechbrain", version("speechbrain"))
torch.manual_seed(0)
logits = torch.randn(8, 50, 20)
targets = torch.randint(1, 20, (8, 50))  # no padding, which is 0
whole, half = torch.ones(8), torch.full((8,), 0.5)


def loss_and_gradient(label_smoothing, length, **options):
    """Return the loss and the norm of its gradient with respect to the logits."""
    leaf = logits.clone().requires_grad_()
    loss = kldiv_loss(
        leaf.log_softmax(-1), targets, length, label_smoothing=label_smoothing, **options
    )
    loss.backward()
    return torch.stack((loss.detach(), leaf.grad.norm()))


numbers = {}
for label_smoothing in (0.0, 1e-6, 0.1):
    for name, length in (("whole", whole), ("half", half)):
        numbers[label_smoothing, name] = loss_and_gradient(label_smoothing, length)
        loss, gradient = numbers[label_smoothing, name].tolist()
        print(f"label_smoothing {label_smoothing:<5}, {name:5} length: ", end="")
        print(f"loss {loss:8.3f}, norm of its gradient {gradient:.4f}")
summed = loss_and_gradient(0.1, whole, reduction="sum")
print(f"label_smoothing 0.1, reduction 'sum': loss {summed[0]:8.3f}")
ratio = numbers[1e-6, "whole"] / numbers[0.0, "whole"]
print(f"from 0 to 1e-6: loss {ratio[0]:.1f} times, gradient {ratio[1]:.1f} times")
is_as_described = ((ratio / targets.numel() - 1).abs() < 1e-3).all().item()
is_as_described &= torch.equal(summed, numbers[0.1, "whole"])
is_as_described &= torch.equal(numbers[0.1, "half"], numbers[0.1, "whole"])
is_as_described &= not torch.allclose(numbers[0.0, "half"], numbers[0.0, "whole"], rtol=1e-3)
sys.exit(0 if is_as_described else "kldiv_loss now returns the mean with label smoothing")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
