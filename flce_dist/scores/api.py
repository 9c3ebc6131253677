"""The public function.  T tokens, V vocabulary rows on this rank, H hidden size, P ranks."""

from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate
from typing_extensions import Unpack

from flce_dist.arguments import values
from flce_dist.arguments.check_tensors import FLOATS, check_tensor
from flce_dist.arguments.decided_once import checked_options
from flce_dist.arguments.dtensor import local_of, localized
from flce_dist.arguments.options import LossOptions, Over, ScoreOptions, keywords_of
from flce_dist.arguments.passed import (
    Arguments,
    in_callers_order,
    may_have_dtensors,
    settled,
    shape_of_tokens,
    tempered,
)
from flce_dist.arguments.prepare import prepare
from flce_dist.arguments.rank_check import check_alike, refusals_told, told_if_unbound
from flce_dist.core.autograd import differentiable, refuse_tracing
from flce_dist.core.interface import Schedule
from flce_dist.schedules.fit import Plan
from flce_dist.schedules.in_forward import InForward
from flce_dist.scores.ids import check_ids, ids_in_order
from flce_dist.scores.in_forward import OverVocabularyInForward
from flce_dist.scores.over_ids import OverIds
from flce_dist.scores.over_vocabulary import OverVocabulary
from flce_dist.torch_private.compiling import outside_graphs


class TokenScores(NamedTuple):
    """Scores of each token, fp32 (fp64 for fp64 hidden), the same bits on every rank of the group.

    Each is differentiable, also together. 0 for a token without ids, and logprob 0 at padding.
    Where a bias of -inf bans all ids that ``over`` names, lse is -inf, the others and the gradients
    of the token are NaN, as in PyTorch. Where it bans all that a token does not name, other is
    -inf, without a gradient.
    """

    logprob: Tensor  # ids' shape: log-probability of each id
    lse: Tensor  # [...] log-sum-exp of the logits that logprob is normalised over
    other: Tensor | None  # [...] log of the probability of all ids not named; None over ids
    entropy: Tensor | None  # [...] of the distribution in nats, if asked for


@told_if_unbound
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    offsets: Tensor | None = None,
    over: Over = "vocabulary",
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
    bias: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    **options: Unpack[ScoreOptions],
) -> TokenScores:
    """Log-probabilities of chosen ids under ``softmax(hidden @ weight.T)``, without the logits.

    With ``z = softcap(logit_scale * (h . w) + b) / temperature``, the log-probability of an id is
    ``z - lse``. An id that a token has several times counts once in every sum, and each of its
    places gets the log-probability.

    Args:
        hidden: [..., H], as for ``linear_cross_entropy``.
        weight: [V, H], likewise; this rank's rows of the vocabulary.
        ids: [..., K] int64 or int32 global ids of each token, with -1 where it has fewer; those of
            all tokens, on every rank. Or [N], with ``offsets``. A token without ids is ignored,
            even if its hidden state is NaN.
        offsets: [T + 1] int64 or int32: token t, counted over all dimensions of hidden in order,
            has ids offsets[t] to offsets[t + 1] (CSR, as engines deliver sampling masks).
        over: what probabilities are normalised over: "vocabulary", or "ids", the set of the token's
            own ids, which needs no pass over the vocabulary: time and memory are those of N rows.
        temperature: a number above 0, or float [...], the same on every rank; it divides the
            logits after softcap, and gets no gradient. A value that is not finite and
            above 0 is an error, on a GPU a failed device assertion. Those of ignored tokens are
            not read.
        with_entropy: also return the entropy of what ``over`` names.
        bias, tp_group: as for ``linear_cross_entropy``.
        **options: softcap, logit_scale, vocab_size, vocab_range, sequence_parallel, sequence_dim,
            reduce_dhidden, reduce_in_fp32, tp_invariant, accumulate_dweight, schedule,
            max_logits_bytes and impl, as in ``linear_cross_entropy``. ``tp_invariant`` covers all
            scores, not gradients, of a token with the same ids. schedule and max_logits_bytes are
            of over="vocabulary"; "in_forward", two GEMMs, needs a weight and bias that need no
            gradient, and no entropy: "auto" is that then.

    Returns:
        ``TokenScores``, plain tensors. Operands may be DTensors as for ``linear_cross_entropy``;
        ids, offsets and temperature with Replicate.

    Raises:
        ValueError: an argument is wrong; an id outside the vocabulary is a failed device assertion
        on a GPU. NotImplementedError: a combination is not supported.

    Example::

        ids = torch.stack([chosen, rejected], dim=1)  # [T, 2]
        scores = linear_logprob(hidden, weight, ids, temperature=0.7)
        margin = scores.logprob[:, 0] - scores.logprob[:, 1]
        margin.sum().backward()
    """
    with refusals_told("linear_logprob", tp_group, hidden):
        over = values.choice("over", over, get_args(Over))
        entropy = values.flag("with_entropy", with_entropy)
        keywords = keywords_of(
            linear_logprob,
            options,
            reduction="none",
            ignore_index=-1,
            label_smoothing=0.0,
            z_loss_weight=0.0,
            max_counted=None,
            skip_ignored=False,
            with_metrics=entropy,
        )
        checked = checked_options(**keywords)
        _check_schedule(over, checked)
        refuse_tracing("linear_logprob", hidden)
        check_tensor("hidden", hidden, FLOATS)
    stand_in = torch.empty((), dtype=torch.int64, device=hidden.device)
    arguments = Arguments(hidden, weight, stand_in, bias, None, temperature, checked, tp_group)
    scored = outside_graphs(_scored, "linear_logprob")
    return scored(arguments, ids, offsets, over)


def _over_vocabulary(of_loss: Plan) -> Schedule:
    """Return the schedule of scores where the loss would take ``of_loss``."""
    if isinstance(of_loss, InForward):
        return OverVocabularyInForward(of_loss)
    return OverVocabulary(of_loss)


def _over_ids(of_loss: Plan) -> Schedule:
    """Return the one schedule, which holds no logits of the vocabulary."""
    return OverIds()


_SCHEDULES = {"vocabulary": _over_vocabulary, "ids": _over_ids}


def _check_schedule(over: Over, options: LossOptions) -> None:
    if not isinstance(options.schedule, str):
        raise NotImplementedError(
            "linear_logprob needs schedule='auto', 'recompute', 'cached' or 'in_forward', since "
            f"its sums leave out named ids, got schedule={options.schedule!r}"
        )
    if over == "ids" and (options.schedule != "auto" or options.max_logits_bytes is not None):
        raise ValueError(
            "schedule and max_logits_bytes are of over='vocabulary', got "
            f"{options.schedule!r} and {options.max_logits_bytes} with over='ids'"
        )


def _scored(arguments: Arguments, ids: Tensor, offsets: Tensor | None, over: Over) -> TokenScores:
    weight = arguments.weight  # as the caller passed it
    with refusals_told("linear_logprob", arguments.tp_group, arguments.hidden):
        if may_have_dtensors(arguments):
            arguments = localized(arguments)
        hidden, local, labels, bias, _, temperature, options, tp_group = arguments
        ids = local_of("ids", ids, Replicate(), tp_group)
        offsets = local_of("offsets", offsets, Replicate(), tp_group)
        labels = labels.expand(shape_of_tokens(hidden, options, tp_group))
        is_transposed = options.sequence_parallel and options.sequence_dim == 1
        of_tokens = tempered(temperature, labels)
        arguments = Arguments(hidden, local, labels, bias, None, of_tokens, options, tp_group)
        ordered, needs = settled(arguments)
        call, operands = prepare(ordered, needs, scores=_SCHEDULES[over])
        flat_ids, cuts = ids_in_order(ids, offsets, labels.shape, hidden, transposed=is_transposed)
    operands = operands._replace(labels=flat_ids, offsets=cuts)
    check_alike("linear_logprob", call, operands)
    check_ids(flat_ids, cuts, operands.inverse_temperature, call.vocab_size)
    logprob, *scores = differentiable(call, operands, weight)
    shape = ordered.labels.shape
    if len(shape) != 1:  # a view is a node of the graph, too
        logprob = logprob.view(ids.shape if offsets is not None else (*shape, ids.shape[-1]))
        scores = [None if x is None else x.view(shape) for x in scores]
    return TokenScores(*in_callers_order((logprob, *scores), ordered, arguments))
