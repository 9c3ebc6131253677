"""Which function a run of the benchmark calls: a peer's, or one of ours with the run's options.

T = tokens, H = hidden size, V = vocabulary rows on this rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flce_dist import (
    filtered,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
    linear_divergence,
)
from flce_dist.best import linear_sample, linear_top_k
from flce_dist.launch.bench.config import RunSpec
from flce_dist.launch.bench.divergences import DIVERGENCES, load_divergence
from flce_dist.launch.bench.peers import LossFunction, load_peer
from flce_dist.launch.bench.problem import IGNORED, Problem
from flce_dist.scores import linear_logprob


def load_run(run: RunSpec, problem: Problem) -> LossFunction:
    """Return the function of a run that is no floor; raise ``Skipped`` if it cannot run here."""
    if run.is_ours:
        return _ours(run, problem)
    if run.impl not in DIVERGENCES:
        return load_peer(run.impl, problem.tp_group)
    divergence = load_divergence(run.impl, str(run.divergence), problem.tp_group)
    return partial(_from_teacher, divergence, problem, run)


def leaves_of(run: RunSpec, problem: Problem) -> tuple[Tensor, Tensor]:
    """Hidden and weight of the problem as a run takes them; no copies."""
    learns = run.mode == "forward_backward"
    hidden = problem.hidden[problem.tokens_of(run)].detach()
    weight = problem.weight.detach()
    return hidden.requires_grad_(learns), weight.requires_grad_(learns and not run.frozen)


def filtered_shares(run: RunSpec, problem: Problem) -> dict[str, float]:
    """Return the ``kept_share`` and ``rank_one_mass`` of a run with filter_eps."""
    results: Any = linear_cross_entropy_with_metrics(
        *leaves_of(run, problem), problem.labels, **_loss_options(run, problem)
    )
    return {name: getattr(results, name).item() for name in ("kept_share", "rank_one_mass")}


def _ours(run: RunSpec, problem: Problem) -> LossFunction:
    options = _options(run, problem)
    if run.divergence is not None:
        call = partial(linear_divergence, kind=run.divergence, **options)
        return partial(_from_teacher, call, problem, run)
    if run.over is not None:
        options["over"] = run.over
        return partial(_label_loss, ids=problem.ids_of(run), options=options)
    if run.best is not None:
        group = {name: options[name] for name in ("tp_group", "impl", "sequence_parallel")}
        return partial(_best, run=run, options=group)
    options = _loss_options(run, problem)
    if run.low_rank:
        return partial(linear_cross_entropy, low_rank=problem.low_rank_of(run), **options)
    if run.per_token:
        return partial(_mean_of_each, options=options)
    return partial(linear_cross_entropy, **options)


def _options(run: RunSpec, problem: Problem) -> dict[str, Any]:
    """Return the keywords that all functions of ours have in common."""
    tp_group = problem.tp_group
    return {
        "tp_group": tp_group, "impl": run.impl, "schedule": run.schedule,
        "max_logits_bytes": run.max_logits_bytes,
        # Alone there is no group to split over: one rank's tokens are all of them.
        "sequence_parallel": run.sequence_parallel and tp_group is not None,
    }  # fmt: skip


def _loss_options(run: RunSpec, problem: Problem) -> dict[str, Any]:
    """Return the keywords of the loss."""
    options = _options(run, problem) | {"skip_ignored": run.skip_ignored}
    if run.max_counted:
        options["max_counted"] = max(1, int(problem.counted.sum()))
    if run.filter_eps is not None:
        options["schedule"] = filtered.schedule(run.filter_eps)
    return options


def _from_teacher(
    call: Callable[..., Tensor],
    problem: Problem,
    run: RunSpec,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
) -> Tensor:
    """Return the mean divergence, of all tokens."""
    teacher_hidden, teacher_weight = problem.teacher
    return call(hidden, weight, teacher_hidden[problem.tokens_of(run)], teacher_weight)


def _label_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, ids: Tensor, options: dict[str, Any]
) -> Tensor:
    """Return the mean loss of the label, the first of each token's ids."""
    logprob = linear_logprob(hidden, weight, ids, **options).logprob
    return torch.nn.functional.nll_loss(logprob, torch.zeros_like(labels))


def _mean_of_each(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: dict[str, Any]
) -> Tensor:
    """Return the mean loss, taken here of a loss for each token."""
    losses = linear_cross_entropy(hidden, weight, labels, reduction="none", **options)
    factors = (labels != IGNORED).to(losses.dtype)
    return (losses * factors).sum() / factors.sum().clamp(min=1)


def _best(
    hidden: Tensor, weight: Tensor, labels: Tensor, run: RunSpec, options: dict[str, Any]
) -> Tensor:
    """Return the mean loss if only labels are ranked, else numbers that all depends on."""
    if run.best == "sample":
        return linear_sample(hidden, weight, 1, **options).logprob
    if run.best == "top_k":
        return linear_top_k(hidden, weight, run.ids, **options).lse
    label_logprob = linear_top_k(hidden, weight, labels=labels, **options).label_logprob
    assert label_logprob is not None
    return -label_logprob.mean()
