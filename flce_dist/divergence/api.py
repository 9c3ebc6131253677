"""The public functions.  T tokens, V vocabulary rows on this rank, H hidden size, P ranks."""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from flce_dist.arguments import values
from flce_dist.arguments.check_tensors import FLOATS, check_tensor
from flce_dist.arguments.decided_once import checked_options
from flce_dist.arguments.options import DivergenceOptions, Kind, keywords_of, signed_like
from flce_dist.arguments.passed import Arguments
from flce_dist.arguments.rank_check import refusals_told, told_if_unbound
from flce_dist.core.autograd import refuse_tracing
from flce_dist.divergence.prepare import TeacherArguments, checked_teacher, diverged
from flce_dist.kernels.divergence.formulas import Measure
from flce_dist.torch_private.compiling import outside_graphs

_LEAST_BETA = math.nextafter(0.0, 1.0)
_MOST_BETA = math.nextafter(1.0, 0.0)


class DivergenceWithMetrics(NamedTuple):
    """The loss, and metrics of each token, without gradients, from the same pass.

    The same bits on every rank of the group; 0 and False for ignored tokens. Where a model bans all
    ids by a bias of -inf, or has a logit that is NaN or inf, loss and overlap are NaN, as its
    entropy is, and same_best is False.
    """

    loss: Tensor  # as of linear_divergence
    entropy: Tensor  # [...] of the student's tempered distribution in nats, fp32
    teacher_entropy: Tensor  # [...] of the teacher's
    same_best: Tensor  # [...] bool: both have the same most likely id; of equal ones the smallest
    overlap: Tensor  # [...] sum over the vocabulary of the smaller probability


@told_if_unbound
def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: Kind = "reverse_kl",
    beta: float = 0.5,
    labels: Tensor | None = None,
    bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    teacher_bias: Tensor | None = None,
    teacher_temperature: float | Tensor | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_rows: Tensor | None = None,
    teacher_vocab_range: tuple[int, int] | None = None,
    tp_group: dist.ProcessGroup | None = None,
    **options: Unpack[DivergenceOptions],
) -> Tensor:
    """Divergence of a student's distributions from a teacher's, without the logits of either.

    With p the softmax of the student's logits ``softcap(logit_scale * (h . w) + b) / temperature``,
    q of the teacher's, made likewise, and ``m = beta q + (1 - beta) p``, the value of a token is::

        forward_kl  KL(q, p) = sum q log(q / p)
        reverse_kl  KL(p, q) = sum p log(p / q)
        jsd         beta KL(q, m) + (1 - beta) KL(p, m)
        tv          sum |p - q| / 2

    Equal models give exactly 0, and a gradient of 0. An id of probability 0 contributes 0 where
    that is the factor of its logarithm; where it is the divisor, the value is inf.

    Args:
        hidden: [..., H] the student's hidden states, as for ``linear_cross_entropy``.
        weight: [V, H], likewise; this rank's rows of the student's vocabulary.
        teacher_hidden: [..., H'] of the same tokens, split over ranks as hidden is; of any of the
            dtypes. The teacher's tensors get no gradient. Their logits are fp32, and fp64 only for
            an fp64 teacher: beside another one an fp64 student has the accuracy of fp32.
        teacher_weight: [V', H'], the teacher's rows of the same ids as this rank's rows of weight,
            in the dtype of teacher_hidden. ``teacher_shard`` makes it of a teacher that is cut
            differently, once. Further rows are padding, where ``vocab_size`` is given.
        kind, beta: above; beta, between 0 and 1, is of jsd.
        labels: [...] int64 or int32, on every rank all tokens'; those that are ``ignore_index``
            (-100) contribute nothing, even if hidden states of either model are NaN. Their values
            are not used otherwise. Default: all tokens count.
        bias, token_weight, temperature, tp_group: as for ``linear_cross_entropy``.
        teacher_bias: [V'], as bias. A bias of -inf bans a column.
        teacher_temperature: as temperature, which it is by default.
        teacher_softcap, teacher_logit_scale: of the teacher's logits.
        teacher_rows: [V] int64 or int32, for a student of fewer ids: the row, in the whole
            vocabulary of the teacher, of each row of weight; on this rank's shard. The teacher's
            distribution is that over these rows. They are copied in each call; ``teacher_shard``
            copies them once.
        teacher_vocab_range: half-open rows (start, end) of teacher_weight. By default vocab_range
            if that is given and teacher_rows is not, else rank r holds [r * V', (r + 1) * V').
        **options: reduction ("none", "sum", or "mean", the default), ignore_index, softcap,
            logit_scale, vocab_size (of both models), vocab_range, sequence_parallel, sequence_dim,
            reduce_dhidden, reduce_in_fp32, tp_invariant, accumulate_dweight, schedule,
            max_logits_bytes (1.25 GiB by default), max_counted, skip_ignored and impl, as for
            ``linear_cross_entropy``. tp_invariant covers values and metrics, by two more passes
            over the logits in memory. schedule "auto" is
            "in_forward" for a reduced loss, four GEMMs; else "cached", which keeps gradients by
            logits, [T, V] in hidden's dtype, of up to 16,384 tokens or within max_logits_bytes, or
            "recompute", which computes both models' logits again, six GEMMs.

    Returns:
        The loss, fp32 (fp64 for fp64 hidden), of tokens' shape with reduction "none", bitwise the
        same on every rank of ``tp_group``. Operands may be DTensors as for
        ``linear_cross_entropy``, those of the teacher with the same placements.

    Raises:
        ValueError: an argument is wrong. NotImplementedError: a combination is not supported.

    Example::

        loss = linear_divergence(
            hidden, weight, teacher_hidden, teacher_weight, kind="forward_kl", temperature=2.0
        )
        loss.backward()  # into the student alone

    Source: the generalised Jensen-Shannon divergence of distillation is that of arXiv:2306.13649.
    """
    return _diverged(
        linear_divergence,
        hidden,
        weight,
        teacher_hidden,
        teacher_weight,
        kind=kind,
        beta=beta,
        labels=labels,
        bias=bias,
        token_weight=token_weight,
        temperature=temperature,
        teacher_bias=teacher_bias,
        teacher_temperature=teacher_temperature,
        teacher_softcap=teacher_softcap,
        teacher_logit_scale=teacher_logit_scale,
        teacher_rows=teacher_rows,
        teacher_vocab_range=teacher_vocab_range,
        tp_group=tp_group,
        **options,
    )[0]


@signed_like(linear_divergence)
@told_if_unbound
def linear_divergence_with_metrics(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    **keywords: Any,
) -> DivergenceWithMetrics:
    """``linear_divergence``, whose keywords it takes, that also returns metrics of each token.

    They take one more pass over the logits, of memory, not a GEMM.

    Example::

        out = linear_divergence_with_metrics(hidden, weight, teacher_hidden, teacher_weight)
        agreement = out.same_best.float().mean()
    """
    operands = hidden, weight, teacher_hidden, teacher_weight
    results = _diverged(linear_divergence_with_metrics, *operands, **{**_DEFAULTS, **keywords})
    return DivergenceWithMetrics(*results)


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(linear_divergence).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def _diverged(
    function: Callable[..., Any],
    /,
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: Any,
    beta: Any,
    labels: Tensor | None,
    bias: Tensor | None,
    token_weight: Tensor | None,
    temperature: float | Tensor,
    teacher_bias: Tensor | None,
    teacher_temperature: float | Tensor | None,
    teacher_softcap: Any,
    teacher_logit_scale: Any,
    teacher_rows: Tensor | None,
    teacher_vocab_range: Any,
    tp_group: dist.ProcessGroup | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Check the options of a call; return the loss and any metrics."""
    with refusals_told(function.__name__, tp_group, hidden):
        of_teacher = checked_teacher(
            teacher_softcap=teacher_softcap,
            teacher_logit_scale=teacher_logit_scale,
            teacher_vocab_range=teacher_vocab_range,
        )
        words = "above 0 and below 1"
        measure = Measure(
            values.choice("kind", kind, get_args(Kind)),
            values.number("beta", beta, words, least=_LEAST_BETA, most=_MOST_BETA),
        )
        keywords = keywords_of(
            function,
            options,
            label_smoothing=0.0,
            z_loss_weight=0.0,
            with_metrics=function is linear_divergence_with_metrics,
        )
        asked = checked_options(**keywords)
        if not isinstance(asked.schedule, str):
            raise NotImplementedError(
                "a divergence needs schedule='auto', 'recompute', 'cached' or 'in_forward', got "
                f"schedule={asked.schedule!r}"
            )
        if asked.schedule == "in_forward" and asked.reduction == "none":
            raise NotImplementedError(
                "schedule='in_forward' of a divergence needs a scalar upstream gradient, got "
                "reduction='none': use schedule='recompute' or 'cached'"
            )
        refuse_tracing(function.__name__, hidden)
        check_tensor("hidden", hidden, FLOATS)
    or_none: Any = labels  # or None, until the number of tokens is known
    student = Arguments(hidden, weight, or_none, bias, token_weight, temperature, asked, tp_group)
    if teacher_temperature is None:
        teacher_temperature = temperature
    teacher = TeacherArguments(
        teacher_hidden, teacher_weight, teacher_bias, teacher_temperature, teacher_rows, of_teacher
    )
    run = outside_graphs(diverged, "linear_divergence")
    return run(function.__name__, student, teacher, measure)
