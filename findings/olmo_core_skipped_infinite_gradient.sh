#!/usr/bin/env bash
# ai2-olmo-core 3.0.0: a step that SkipStepAdamW skips because its gradients are infinite still
# makes parameters, and both moments, NaN for good: the step is skipped by a product with 0, and 0
# times infinity is NaN. step_skipped is 1 all the same. In SkipStepLion the parameters stay, but
# the momentum is NaN then. In both, the infinite norm stays among the last norms, whose mean is
# infinite therefore, so that every later step is skipped, however good, until it has left them. No
# warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 ai2-olmo-core==3.0.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from olmo_core.optim import SkipStepAdamW, SkipStepLion

interval, bad_step = 8, 8


def train(cls, bad_gradient, **options):
    """Return the optimizer and its parameter after 20 steps, and the steps it says it skipped."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = cls([parameter], lr=0.01, rolling_interval_length=interval, **options)
    skipped = []
    for step in range(20):
        parameter.grad = torch.randn(4, generator=generator)
        if step == bad_step:
            parameter.grad[1] = bad_gradient
        optimizer.latest_loss = 1 + 0.1 * torch.rand((), generator=generator)
        optimizer.latest_grad_norm = parameter.grad.norm()
        before = parameter.detach().clone()
        optimizer.step()
        if optimizer.step_skipped.item() == 1:
            skipped.append(step)
            if step == bad_step:
                print(f"        step {step} skipped: {before.tolist()}")
                print(f"             became {parameter.tolist()}")
    return optimizer.state[parameter], parameter.detach(), skipped


is_as_described = True
for cls, options in (
    (SkipStepAdamW, {"foreach": False}),
    (SkipStepAdamW, {"foreach": True}),
    (SkipStepLion, {}),
):
    print(cls.__name__, options)
    for bad_gradient in (1e6, float("inf")):
        print(f"    a gradient of {bad_gradient}")
        state, parameter, skipped = train(cls, bad_gradient, **options)
        broken = [name for name, value in state.items() if value.isnan().any()]
        print(f"        skipped steps {skipped}; NaN in the state: {broken}")
        print(f"        parameters at last {parameter.tolist()}")
        if bad_gradient == 1e6:
            is_as_described &= skipped == [bad_step] and not broken
            is_as_described &= bool(parameter.isfinite().all())
        else:
            # later norms are compared with the mean of those before, among them the infinite one
            is_as_described &= skipped == list(range(bad_step, bad_step + interval + 1))
            is_as_described &= "exp_avg" in broken
            is_as_described &= bool(parameter.isnan().any()) == (cls is SkipStepAdamW)
sys.exit(0 if is_as_described else "a skipped infinite gradient no longer leaves anything behind")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
