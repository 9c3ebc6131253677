"""How ``verify`` judges best ids, ranks and samples: by the log-probabilities of all ids in fp64.

Logits that are nearly equal may rank in either order, so values are compared, and places within
what rounding explains. T = tokens, V = whole vocabulary, k = ids of a token.
"""

from typing import Any

import torch
from torch import Tensor

from flce_dist import linear_sample, linear_top_k
from flce_dist.launch.verify.data import Data
from flce_dist.reference import reference_linear_top_k
from flce_dist.testing import ErrorBudget, relative_rms

BUDGET = 1e-5
"""Relative error of log-probabilities, as of the loss."""

NATS = 1e-3
"""By which logits may differ that rounding puts into another order: 3e-6 of one of 150 is less."""

SEED = 2**33 + 5


def best_results(
    data: Data, tokens: slice, own: slice, k: int, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Return this rank's results, of all tokens: of best ids, then of samples."""
    hidden = data.hidden[tokens]
    weight = data.weight[own]
    options = {**options, "bias": None if data.bias is None else data.bias[own]}
    k = min(k, data.vocab_size)
    best: Any = linear_top_k(hidden, weight, k, labels=data.labels, **options)
    drawn = linear_sample(hidden, weight, SEED, **options)
    return {**best._asdict(), "drawn": drawn.ids, "drawn_logprob": drawn.logprob}


def check_best(results: dict[str, Tensor], data: Data, options: dict[str, Any]) -> dict[str, Any]:
    """Compare results with the log-probabilities of all ids, of the tokens that are not ignored.

    ``places`` counts tokens with a repeated id, or with a rank of their label that rounding does
    not explain, and what ignored tokens have of ids and ranks: -1 is nothing.
    """
    every = reference_linear_top_k(
        data.hidden.double(), data.weight.double(), data.vocab_size, labels=data.labels,
        bias=None if data.bias is None else data.bias.double(), **options,
    )  # fmt: skip
    counted = data.labels != -100
    ids, logprob, lse, label_logprob, _ = (None if x is None else x[counted] for x in every)
    assert ids is not None and logprob is not None and lse is not None
    assert label_logprob is not None
    by_id = torch.empty_like(logprob).scatter_(1, ids, logprob)
    of_counted = {name: x[counted] for name, x in results.items()}
    k = of_counted["ids"].shape[1]
    drawn = of_counted["drawn"]
    errors = {
        "logprob": relative_rms(of_counted["logprob"], logprob[:, :k]),
        "ids": relative_rms(by_id.gather(1, of_counted["ids"]), logprob[:, :k]),
        "lse": relative_rms(of_counted["lse"], lse),
        "drawn": relative_rms(of_counted["drawn_logprob"], by_id.gather(1, drawn[:, None])[:, 0]),
        "label_logprob": relative_rms(of_counted["label_logprob"], label_logprob),
    }
    checks = {name: ErrorBudget(error, BUDGET) for name, error in errors.items()}
    least, most = ((by_id > label_logprob[:, None] + nats).sum(1) for nats in (NATS, -NATS))
    is_right = (of_counted["label_rank"] >= least) & (of_counted["label_rank"] < most)
    is_right &= (of_counted["ids"].sort(1).values.diff() > 0).all(1)
    of_ignored = [(x[~counted] != -1).sum() for x in (results["ids"], results["label_rank"])]
    checks["places"] = ErrorBudget(float((~is_right).sum() + sum(of_ignored)), 0.0)
    return checks
