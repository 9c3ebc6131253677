"""CUDA graphs: forward and backward captured once, replayed on other data, equal to the bit."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import (
    LinearCrossEntropy,
    filtered,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
)
from tests.devices import (
    CUDA,
    EVERY_SCHEDULE,
    SMALL,
    Replayed,
    inputs_on,
    on_cuda,
    options_of,
)
from tests.problems import IGNORE, Inputs, pairwise


def batch(seed: int, device: str) -> Inputs:
    """Other data for each seed; other tokens are ignored, other rows need the rescue."""
    inputs = inputs_on(
        device, *SMALL[device], torch.bfloat16, seed=seed, bias=True, token_weight=True,
        temperature=True,
    )  # fmt: skip
    hopeless = 5 + len(inputs.labels) // 6 * seed
    inputs.labels[hopeless] = seed
    inputs.hidden[hopeless] = -100 * inputs.weight[seed]
    inputs.labels[2 * seed] = IGNORE
    inputs.hidden[2 * seed] = torch.nan
    return inputs


def step_on(inputs: Inputs, **options: Any) -> list[Tensor]:
    """Loss and gradients, and the metrics if these are asked for by ``metrics=True``."""
    given = inputs.hidden, inputs.weight, inputs.bias
    leaves = [x.requires_grad_() for x in given if x is not None]
    hidden, weight, bias = leaves
    of_tokens = {"token_weight": inputs.token_weight, "temperature": inputs.temperature}
    kwargs = {"bias": bias, **of_tokens, **options}
    if kwargs.pop("metrics", False):
        out = linear_cross_entropy_with_metrics(hidden, weight, inputs.labels, **kwargs)
        total = out.loss
        if isinstance(options.get("schedule", "auto"), str):  # else metrics have no gradients
            total = total + (out.entropy + 0.1 * out.lse - out.logprob).sum()
        return [*(x.detach() for x in out), *torch.autograd.grad(total, leaves)]
    loss = linear_cross_entropy(hidden, weight, inputs.labels, **kwargs)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


EVERY = itertools.product([None, 0.9, "skips"], [False, True], [*EVERY_SCHEDULE, "filtered"])
# In_forward has no gradient of the metrics.
CASES = [case for case in EVERY if case[1:] != (True, "in_forward")]
ON_EACH_DEVICE = [
    *((*case, "cpu") for case in pairwise(CASES)),
    *(pytest.param(*case, *CUDA.values, marks=CUDA.marks) for case in CASES),
]


@pytest.mark.parametrize(("counted", "metrics", "schedule", "device"), ON_EACH_DEVICE)
def test_replay_equals_a_plain_call(counted, metrics, schedule, device):
    """Captured with one batch, replayed with others; of each other tiles are kept.

    Another fifth of the tokens is ignored, so that ``counted`` of all hold those that count.
    """
    static = batch(0, device)
    if schedule == "filtered":  # in rounds
        budget = static.weight.shape[0] * 2 * len(static.labels) // 3
        options = {"schedule": filtered.schedule(2.0**-9), "max_logits_bytes": budget}
    else:
        options = options_of(schedule, static)
    if metrics:
        options |= {"metrics": True, "label_smoothing": 0.1}
    if counted == "skips":
        options["skip_ignored"] = True
    elif counted is not None:
        options["max_counted"] = round(counted * len(static.labels))
    seeds = (1, 2, 3, 0) if device == "cuda" else (1, 0)
    expected = {seed: step_on(batch(seed, device), **options) for seed in seeds}
    replayed = Replayed(lambda: step_on(static, **options), device)
    for seed in seeds:
        with torch.no_grad():
            for name, buffer in vars(static).items():
                buffer.copy_(getattr(batch(seed, device), name))
        assert not equal(replayed.results, expected[seed])  # nothing new before the replay
        replayed.replay()
        assert all(x.isfinite().all() for x in replayed.results if x.is_floating_point())
        assert equal(replayed.results, expected[seed]), f"batch {seed}"


@on_cuda
@pytest.mark.parametrize("schedule", ["recompute", "cached", "in_forward"])
def test_make_graphed_callables_on_the_module(schedule, device):
    _, V, H = SMALL[device]
    head: Any = LinearCrossEntropy(H, V, schedule=schedule, device=device, dtype=torch.bfloat16)

    def gradients(batches: list[Inputs]) -> list[Tensor]:
        out: list[Tensor] = []
        for one in batches:
            hidden = one.hidden.clone().requires_grad_()
            head.weight.grad = None
            loss = 3 * head(hidden, one.labels)
            loss.backward()
            out += [loss.detach().clone(), hidden.grad.clone(), head.weight.grad.clone()]  # type: ignore[union-attr]
        return out

    batches = [batch(seed, device) for seed in range(3)]
    expected = gradients(batches)
    sample = (batches[0].hidden.clone().requires_grad_(), batches[0].labels.clone())
    head = torch.cuda.make_graphed_callables(head, sample)
    assert equal(gradients(batches), expected)
    assert not equal(gradients(batches[1:]), expected[:6])
