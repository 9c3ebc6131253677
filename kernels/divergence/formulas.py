"""Formulas: divergences of a student p from a teacher q, and their gradients.  T = tokens.

s and t are the tempered logits of student and teacher, p and q their softmax. Logarithms are taken
relative to the largest logit: ``log p_v = (s_v - top) - log_total``. Their difference is ``d_v =
log p_v - log q_v``, as ``((s_v - top) - (t_v - teacher_top)) - shift`` with ``shift = log_total -
teacher_log_total``: a constant in either's logits costs no accuracy, and equal models give exactly
0. With ``m = beta q + (1 - beta) p``::

    kind        value of a token                              gradient by s_v
    forward_kl  sum q (-d)                                    p - q
    reverse_kl  sum p d                                       p (d - centre), centre the value
    jsd         beta sum q a + (1 - beta) sum p b             (1 - beta) p (b - centre),
                  a = log(q / m) = -log1p((1 - beta) (e^d - 1))   centre = sum p b
                  b = log(p / m) = -log1p(beta (e^-d - 1)) = a + d
    tv          sum of p - q where p > q                      p ([p > q] - centre),
                                                                  centre = sum of p where p > q

The gradient of a token sums to 0. Terms of probability 0 are 0, whatever their logarithm is. The
value is NaN where a model has no distribution: all its logits are -inf, or one is NaN or inf.

The two Kullback-Leibler divergences follow from one pass over the logits: with the model whose
probabilities weigh as the first, ``sum p1 (z1 - z2) - (lse1 - lse2)``. The others need both lse
before their sums.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Measure(NamedTuple):
    """Which divergence, or ``TOTALS``."""

    kind: str  # "forward_kl", "reverse_kl", "jsd" or "tv"
    beta: float  # of jsd

    @property
    def is_teacher_first(self) -> bool:
        return self.kind == "forward_kl"

    @property
    def takes_one_pass(self) -> bool:
        return self.kind in ("forward_kl", "reverse_kl")

    @property
    def sums(self) -> int:
        """How many sums over v a pass with known lse takes."""
        return 1 if self.takes_one_pass else 2


TOTALS = Measure("totals", 0.0)
"""Both models' sums of exponentials, where a pass over stored logits takes them."""

METRIC_SUMS = 3  # both entropies and the total variation, which add up over shards
METRIC_ROWS = METRIC_SUMS + 4  # and of each model the largest logit and its id, which do not


class PairStats(NamedTuple):
    """What is known of tokens over the whole vocabulary, the same on every rank; [T] each."""

    top: Tensor  # the student's largest logit
    log_total: Tensor  # log of the sum of exponentials relative to it
    teacher_top: Tensor
    teacher_log_total: Tensor
    shift: Tensor  # the difference of both log_total, free of their rounding
    value: Tensor
    centre: Tensor  # as above; not of forward_kl

    def tokens(self, start: int, end: int) -> "PairStats":
        return PairStats(*(x[start:end] for x in self))


class PairMetrics(NamedTuple):
    entropy: Tensor  # [T] of the student, in nats
    teacher_entropy: Tensor
    same_best: Tensor  # [T] bool: both have the same most likely id; of equal ones the smallest
    overlap: Tensor  # [T] sum of min(p, q)


def stats_of_totals(of_ranks: Tensor, measure: Measure, dtype: torch.dtype) -> PairStats:
    """Merge [P, 5, T]: the first model's maximum and sum of exponentials, those of the second, and
    the differences weighed by the first. Exponentials are relative to the maximum of their rank.
    """
    first_max, first_sum, second_max, second_sum, weighted = of_ranks.double().unbind(1)
    first_top, first_log, factor = _log_total(first_max, first_sum)
    second_top, second_log, _ = _log_total(second_max, second_sum)
    shift = first_log - second_log
    weighted = (weighted * factor).sum(0) * (-first_log).exp()
    value = weighted - (first_top - second_top) - shift
    value = value.clamp_min(0.0)  # but for rounding it is not negative
    student = (first_top, first_log)
    teacher = (second_top, second_log)
    if measure.is_teacher_first:
        student, teacher, shift = teacher, student, -shift
    return PairStats(*(x.to(dtype) for x in (*student, *teacher, shift, value, value)))


def _log_total(maximum: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest maximum [T], log of the sum relative to it, and the ranks' factors."""
    top = maximum.amax(0)
    factor = (maximum - top).exp().where(maximum != -torch.inf, 0.0)  # no column, or all banned
    return top, (total * factor).sum(0).log(), factor


def with_totals(stats: PairStats, totals: Tensor) -> PairStats:
    """Return the statistics with both logarithms of these sums [2, T] over all ranks."""
    own, theirs = totals.log()
    own, theirs, shift = (x.to(stats.top.dtype) for x in (own, theirs, own - theirs))
    return stats._replace(log_total=own, teacher_log_total=theirs, shift=shift)


def stats_of_sums(stats: PairStats, sums: Tensor, measure: Measure) -> PairStats:
    """Return the statistics with value and centre from the ``measure.sums`` sums [k, T] of all."""
    value = sums[0]
    centre = sums[-1]
    if measure.kind == "jsd":
        value = measure.beta * value + (1 - measure.beta) * centre
    elif measure.kind == "tv":
        value = value + _undefined(stats)
    dtype = stats.top.dtype
    return stats._replace(value=value.clamp_min(0.0).to(dtype), centre=centre.to(dtype))


def largest_probability(stats: PairStats, measure: Measure) -> Tensor:
    """Return [T]: the largest of the probabilities that a gradient is made of."""
    log_total = stats.log_total
    if measure.kind == "forward_kl":
        log_total = torch.minimum(log_total, stats.teacher_log_total)
    return (-log_total).exp()


def metrics_of(stats: PairStats, sums: Tensor, best: Tensor) -> PairMetrics:
    """Return metrics from sums [3, T] over all ranks, and each rank's best ids [P, 4, T].

    The sums are both entropies and the total variation; best has the student's largest logit and
    its id, then the teacher's.
    """
    own, theirs = (_best_id(*best[:, rows].unbind(1)) for rows in (slice(0, 2), slice(2, 4)))
    entropy, teacher_entropy, variation = sums.to(stats.top.dtype)
    overlap = 1 - variation + _undefined(stats)
    return PairMetrics(entropy, teacher_entropy, (own == theirs) & ~overlap.isnan(), overlap)


def _undefined(stats: PairStats) -> Tensor:
    """Return 0, but NaN where a model has no distribution, which ``p > q`` does not show."""
    return stats.shift - stats.shift


def _best_id(largest: Tensor, ids: Tensor) -> Tensor:
    return ids.where(largest == largest.amax(0), torch.inf).amin(0)
