#!/usr/bin/env bash
# speechbrain 1.1.2: WarmCoolDecayLRSchedule ("Warms up linearly, very slowly decays and cools down
# linearly again at the end of training") does not cool down from the learning rate that it has
# reached. The decay counts the steps after the warmup, the start of the cooldown counts all steps:
# at the first step of the cooldown the rate falls by decay_factor ** (warmup / decay_every), and
# the whole cooldown is lower by that. With a warmup of 10,000 steps and a factor of 0.5 each 10,000
# steps, it is halved at once. Nearly without a warmup there is no jump.
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

# the schedules do not need torchaudio, which speechbrain imports
torchaudio = types.ModuleType("torchaudio")
torchaudio.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
torchaudio.__version__ = "2.11.0"
torchaudio.list_audio_backends = lambda: ["soundfile"]
sys.modules["torchaudio"] = torchaudio

import torch  # noqa: E402
from speechbrain.nnet.schedulers import WarmCoolDecayLRSchedule  # noqa: E402

print("torch", torch.__version__, "speechbrain", version("speechbrain"))
decay_every, cooldown, total_steps = 10_000, 20_000, 80_000
start = total_steps - cooldown  # of the cooldown

is_as_described = True
for warmup, decay_factor in ((1, 0.5), (10_000, 0.75), (10_000, 0.5), (30_000, 0.5)):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = WarmCoolDecayLRSchedule(
        lr=1.0,
        warmup=warmup,
        cooldown=cooldown,
        total_steps=total_steps,
        decay_factor=decay_factor,
        decay_every=decay_every,
    )
    rates = {}
    for step in (start - 1, start, start + 1, start + cooldown // 2, total_steps):
        schedule(optimizer, step)
        rates[step] = optimizer.param_groups[0]["lr"]
    print(f"warmup {warmup}, decay_factor {decay_factor}, learning rates from the cooldown on:")
    print("   ", ", ".join(f"step {step}: {rate:.6f}" for step, rate in rates.items()))
    jump, expected = rates[start + 1] / rates[start], decay_factor ** (warmup / decay_every)
    print(f"    first step of the cooldown: {jump:.4f} times the last rate, before it ", end="")
    print(f"{rates[start] / rates[start - 1]:.4f} times")
    is_as_described &= abs(jump / expected - 1) < 1e-3
    is_as_described &= abs(rates[start] / rates[start - 1] - 1) < 1e-3 and rates[total_steps] == 0
sys.exit(0 if is_as_described else "the cooldown now starts at the rate reached")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
