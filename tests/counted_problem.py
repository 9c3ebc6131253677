"""Calls in which some tokens count alone, and their comparison with the definition.

T tokens, V vocabulary rows, H hidden size.
"""

from dataclasses import replace
from typing import Any

import torch

from flce_dist import filtered
from flce_dist.kernels.rows.counted_tokens import counts
from tests.parallel_problem import Problem, plan_sizes
from tests.problems import (
    IGNORE,
    SCHEDULES,
    Inputs,
    Upstream,
    compare,
    make_inputs,
    metric_upstream,
    per_token_upstream,
    poisoned_memory,
    run_op,
)

T = 300
V = 70
H = 32
t = torch.arange(T)
MASKS = {
    "all": t >= 0,
    "half": t % 2 == 0,
    "tenth": torch.rand(T, generator=torch.Generator().manual_seed(0)) < 0.1,
    "none": t < 0,
    "one per block": t % 128 == 33,
    "last": t == T - 1,
}
EVERY: dict[str, dict[str, Any]] = {
    **{str(name): {"schedule": name} for name in SCHEDULES},
    "some cached": {"schedule": "cached", "max_logits_bytes": 40_000},
    "chunks": {"schedule": "in_forward", "max_logits_bytes": 20_000},
    "filtered": {"schedule": filtered.schedule(0.01)},
}


def masked(name: str, dtype: torch.dtype = torch.float32) -> tuple[Inputs, Inputs]:
    """Inputs of which a mask counts, and what they mean: other tokens are ignored, and 0."""
    inputs = make_inputs(T, V, H, dtype, bias=True, token_weight=True, ignored=0.0)
    weights: Any = inputs.token_weight
    skipped = ~MASKS[name]
    of_weight_0 = skipped & (t % 3 == 0)
    hidden = inputs.hidden.masked_fill(skipped[:, None], 0.0)
    labels, weights = inputs.labels.masked_fill(skipped, IGNORE), weights.masked_fill(skipped, 0.0)
    meant = replace(inputs, hidden=hidden, labels=labels, token_weight=weights)
    given = replace(
        inputs,
        hidden=hidden.masked_fill(skipped[:, None], torch.nan),
        labels=labels.masked_fill(of_weight_0, 1 << 40),
        token_weight=weights.masked_fill(skipped & ~of_weight_0, torch.nan),
    )
    return given, meant


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {"reduction": "mean"},
    "sum": {"reduction": "sum", "label_smoothing": 0.1, "z_loss_weight": 0.01},
    "none": {"reduction": "none", "softcap": 5.0, "logit_scale": 0.7},
    "metrics": {"reduction": "none"},
}


def bound(mask: str, more: int = 0) -> int:
    return max(1, int(MASKS[mask].sum()) + more)


def upstream_of(loss: str) -> Upstream:
    metrics = metric_upstream(T, "lse", "logprob", "entropy") if loss == "metrics" else {}
    return Upstream(0.7 if loss in ("mean", "sum") else per_token_upstream(T), metrics)


def check(
    schedule: str, dtype: torch.dtype, mask: str, loss: str, more: int | None, skips: bool,
    impl: str,
) -> None:  # fmt: skip
    """Compare with the definition; ``max_counted`` exceeds the tokens that count by ``more``."""
    of_loss_only = EVERY[schedule]["schedule"] not in ("recompute", "cached")
    if of_loss_only and LOSSES[loss]["reduction"] == "none":
        loss = "sum"
    options = {**EVERY[schedule], **LOSSES[loss], "skip_ignored": skips}
    if more is not None:
        options["max_counted"] = bound(mask, more)
    (given, meant), upstream = masked(mask, dtype), upstream_of(loss)
    with plan_sizes(tile=8, min_window=8), poisoned_memory():
        found = run_op(given, upstream, impl=impl, **options)
    compare(found, meant, upstream, **options)


# No token of the first half counts.
ONE_RANK = Problem(T=48, options={"token_weight": (torch.arange(48) // 24).float()})


def n_of(problem: Problem) -> int:
    weight = problem.options.get("token_weight")
    return int(counts(problem.tensors[3], weight, IGNORE).sum())
