"""The loss of confident tokens, and its weights."""

from typing import Any

import torch
import torch.nn.functional as F

from tests.problems import (
    Upstream,
    both,
    each_dtype,
    each_schedule,
    run_op,
    with_logits,
)


@both
@each_dtype
@each_schedule
def test_confident_tokens_keep_relative_accuracy(impl, schedule, dtype):
    """Where ``lse - z_label`` and ``p_label - 1`` cancel, in fp64 too: hence a closed form."""
    margins = torch.arange(2.0, 62.0, 4.0)
    T, V = len(margins), 70
    labels = torch.arange(T) * 4
    at_label = F.one_hot(labels, V).bool()
    inputs = with_logits(at_label * margins[:, None], labels, dtype)
    options: dict[str, Any] = {"impl": impl, "schedule": schedule, "reduction": "sum"}
    results = run_op(inputs, Upstream(), with_metrics=True, **options)

    others = (V - 1) * (-margins.double()).exp()
    loss, p_other = others.log1p(), others / (1 + others) / (V - 1)
    assert ((-results["logprob"] - loss).abs() <= 1e-5 * loss).all()
    expected = torch.where(at_label, -(V - 1) * p_other[:, None], p_other[:, None])
    eps = torch.finfo(dtype).eps
    if dtype == torch.float16:
        # dlogits are p itself, as accurate as fp16 holds it; what is cached was bf16.
        expected = expected.where(expected.abs() >= torch.finfo(dtype).tiny, 0.0)
        eps = eps if schedule == "recompute" else torch.finfo(torch.bfloat16).eps
    error = (results["dweight"].T - expected).abs() / expected.abs()
    assert error[expected != 0].max() <= 2 * eps + 1e-5
