#!/usr/bin/env bash
# captum 0.9.0: influences by TracInCPFast are, says its docstring, "exactly the same as when naive
# back-propagation is used" on the last fully connected layer. They leave out the layer's bias, that
# torch.nn.Linear has by default. TracInCP with layers= that layer counts it, so the two disagree,
# also on which training examples matter most; self-influences are too small. With bias=False they
# are the same. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 captum==0.9.0
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch
from captum.influence import TracInCP, TracInCPFast
from torch.utils.data import TensorDataset

warnings.simplefilter("ignore")
CLASSES, HIDDEN, TOP = 4, 8, 5


def load(model, checkpoint):
    return 1.0  # the learning rate; there is one checkpoint, the model as it is


is_as_described = True
for bias in (False, True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, CLASSES, bias=bias)
    ).double()
    last = model[2]
    train = TensorDataset(torch.randn(200, 6).double(), torch.randint(CLASSES, (200,)))
    test = torch.randn(50, 6).double(), torch.randint(CLASSES, (50,))
    loss = torch.nn.CrossEntropyLoss(reduction="sum")
    options = {"checkpoints_load_func": load, "loss_fn": loss, "batch_size": 50}
    full = TracInCP(
        model, train, ["model"], layers=["2"], sample_wise_grads_per_batch=True, **options
    )
    fast = TracInCPFast(model, last, train, ["model"], **options)

    expected, found = full.influence(test), fast.influence(test)
    hidden = [torch.tanh(model[0](inputs)).detach() for inputs in (test[0], train.tensors[0])]
    errors = [
        last(h).softmax(-1).detach() - torch.nn.functional.one_hot(labels, CLASSES)
        for h, labels in zip(hidden, (test[1], train.tensors[1]), strict=True)
    ]
    by_hand = (errors[0] @ errors[1].T) * (hidden[0] @ hidden[1].T + bias)
    assert torch.allclose(expected, by_hand)

    difference = ((found - expected).norm() / expected.norm()).item()
    tops = [scores.topk(TOP).indices for scores in (expected, found)]
    shared = (tops[0][:, :, None] == tops[1][:, None, :]).any(-1).double().mean().item()
    own = (fast.self_influence() / full.self_influence()).mean().item()
    print(f"{bias=}: TracInCPFast is off by {difference:.1%};", end=" ")
    print(f"{shared:.0%} of the {TOP} most helpful examples agree;", end=" ")
    print(f"self-influence is {own:.2f} of TracInCP's")
    if bias:
        is_as_described &= difference > 0.1 and shared < 0.9 and own < 0.9
        without = found - (errors[0] @ errors[1].T) * (hidden[0] @ hidden[1].T)
        is_as_described &= without.abs().max().item() < 1e-9
    else:
        is_as_described &= difference < 1e-9 and shared == 1 and abs(own - 1) < 1e-9
sys.exit(0 if is_as_described else "TracInCPFast now counts the bias")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
