"""The public functions.  T tokens, V vocabulary rows on this rank, H hidden size, P ranks."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from flce_dist.arguments import values
from flce_dist.arguments.check_tensors import FLOATS, LABELS, check_tensor
from flce_dist.arguments.decided_once import checked_options
from flce_dist.arguments.dtensor import localized
from flce_dist.arguments.options import LossOptions, SampleOptions, TopKOptions, keywords_of
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
from flce_dist.best.schedule import Sample, TopK
from flce_dist.core.autograd import refuse_tracing, run_forward
from flce_dist.core.call import NO_GRADIENT
from flce_dist.kernels.best.interface import MOST_K
from flce_dist.torch_private.compiling import outside_graphs

_FIXED: dict[str, Any] = dict(
    reduction="none",
    label_smoothing=0.0,
    z_loss_weight=0.0,
    reduce_dhidden=True,
    reduce_in_fp32=False,
    accumulate_dweight=False,
    schedule="auto",
    max_logits_bytes=None,
    skip_ignored=False,
)


class BestIds(NamedTuple):
    """The best ids of each token, the same bits on every rank of the group; without gradients.

    Tensors are fp32 (fp64 for fp64 hidden). A token whose logits are not finite numbers has NaN,
    and -1 as ids and rank; an ignored one 0, and -1. Where a bias of -inf bans all ids lse is -inf,
    ids are -1 with logprob -inf, and label_logprob is NaN.
    """

    ids: Tensor | None  # [..., k] int64, the most likely first, -1 where there is none; if k given
    logprob: Tensor | None  # [..., k], -inf where there is no id
    lse: Tensor  # [...] log-sum-exp of the logits
    label_logprob: Tensor | None  # [...] if labels are given
    label_rank: Tensor | None  # [...] int64: how many ids come before the label; 0 is the best

    def csr(self) -> tuple[Tensor, Tensor]:
        """Return ids [N] without padding and their offsets [T + 1], both int64, tokens in order.

        ``linear_logprob`` takes both. N depends on data, so the host waits for the device.
        """
        if self.ids is None:
            raise ValueError("csr needs ids: pass k to linear_top_k")
        ids = self.ids.reshape(-1, self.ids.shape[-1])
        is_id = ids >= 0
        return ids[is_id], torch.nn.functional.pad(is_id.sum(1).cumsum(0), (1, 0))


class SampledIds(NamedTuple):
    """One id of each token, the same on every rank of the group; without gradients."""

    ids: Tensor  # [...] int64; -1 where logits are not finite numbers, or all banned
    logprob: Tensor  # [...] fp32 (fp64 for fp64 hidden), NaN or -inf there


@told_if_unbound
def linear_top_k(
    hidden: Tensor,
    weight: Tensor,
    k: int | None = None,
    *,
    labels: Tensor | None = None,
    top_p: float | None = None,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    **options: Unpack[TopKOptions],
) -> BestIds:
    """The k most likely ids under ``softmax(hidden @ weight.T)``, and the rank of the label.

    Exact: as a stable descending sort of ``z = softcap(logit_scale * (h . w) + b) / temperature``,
    whose equal logits rank by id, the smaller first. ``k=1`` is the argmax.

    Args:
        hidden: [..., H], as for ``linear_cross_entropy``.
        weight: [V, H], likewise; this rank's rows of the vocabulary.
        k: ids of each token, up to 2048; also more than a rank has rows. None: no ids, but lse and
            what belongs to labels. Ids banned by a bias of -inf are never among them.
        labels: [...] int64 or int32 global ids of all tokens, as for ``linear_cross_entropy``.
            Tokens with ``ignore_index`` get no ids. Default: no labels, and no token is ignored.
        top_p: end a token's ids with the one at which their probabilities, over the whole
            vocabulary, add up to this: its nucleus, if that has at most k ids. The others are -1.
        temperature: a number above 0, or float [...] above 0 for each token that counts, the same
            on every rank; it divides the logits after softcap.
        bias, tp_group: as for ``linear_cross_entropy``.
        **options: ignore_index, softcap, logit_scale, vocab_size, vocab_range, sequence_parallel,
            sequence_dim, tp_invariant, max_counted and impl, as in ``linear_cross_entropy``.
            ``tp_invariant`` covers all results.

    Returns:
        ``BestIds``, plain tensors. Ids [..., k] with -1, or those of ``BestIds.csr``, are what
        ``linear_logprob`` takes. Operands may be DTensors as for ``linear_cross_entropy``.

    Raises:
        ValueError: an argument is wrong. NotImplementedError: a combination is not supported, or
        an operand requires a gradient, which results do not have.

    Example::

        with torch.no_grad():
            best = linear_top_k(hidden, weight, 8, labels=labels)
        correct = best.label_rank == 0  # the label is the most likely id
        mass = best.logprob.exp().sum(-1)  # of the 8 best ids
    """
    with refusals_told("linear_top_k", tp_group, hidden):
        checked = checked_options(**keywords_of(linear_top_k, options, **_FIXED))
        words = f"within [1, {MOST_K}]"
        k = values.integer("k", k, words, least=1, end=MOST_K + 1, optional=True)
        top_p = _checked_top_p(top_p)
        if k is None and labels is None:
            raise ValueError("k or labels must be given, got None for both: nothing is asked for")
        if top_p is not None and k is None:
            raise ValueError("k must be given with top_p, as the most ids of a token, got None")
        if labels is None and checked.max_counted is not None:
            raise ValueError(
                "labels must be given with max_counted, since they say which tokens count, got None"
            )
    if labels is None and checked.ignore_index == 0:  # what each token then has as its label
        checked = replace(checked, ignore_index=-1)
    schedule = TopK(k or 0, top_p, with_labels=labels is not None)
    arguments = _arguments(hidden, weight, labels, bias, temperature, checked, tp_group)
    lse, ids, logprob, label_logprob, label_rank = _results("linear_top_k", arguments, schedule)
    return BestIds(ids, logprob, lse, label_logprob, label_rank)


def _checked_top_p(top_p: float | None) -> float | None:
    words = "above 0 and at most 1"
    least = math.nextafter(0.0, 1.0)
    return values.number("top_p", top_p, words, least=least, most=1.0, optional=True)


@told_if_unbound
def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    seed: int,
    *,
    counters: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    **options: Unpack[SampleOptions],
) -> SampledIds:
    """Draw one id of each token from ``softmax(hidden @ weight.T)``.

    The id is the argmax of ``z + g``, with z as in ``linear_top_k`` and Gumbel noise g that depends
    on seed, the token's counter and the global id alone. So a draw is the same for any number of
    ranks, and whatever other tokens are in the call.

    Args:
        seed: an int within [0, 2**63), the same on every rank; another one for each step of a
            loop, or other counters, since the same draw the same noise again.
        counters: int64 or int32 [...], the same on every rank: which draw each token gets. Tokens
            of one counter get the same noise. Default: the token's number in the call.
        hidden, weight, temperature, bias, tp_group: as for ``linear_top_k``.
        **options: softcap, logit_scale, vocab_size, vocab_range, sequence_parallel, sequence_dim,
            tp_invariant and impl, as there.

    Returns:
        ``SampledIds``, plain tensors; logprob is that of the tempered distribution.

    Raises:
        As ``linear_top_k``.

    Example::

        with torch.no_grad():
            for step in range(3):
                ids, logprob = linear_sample(hidden, weight, seed=step, temperature=0.8)
    """
    with refusals_told("linear_sample", tp_group, hidden):
        seed = values.integer("seed", seed, "within [0, 2**63)", least=0)
        keywords = keywords_of(linear_sample, options, ignore_index=-1, max_counted=None, **_FIXED)
        checked = checked_options(**keywords)
    arguments = _arguments(hidden, weight, counters, bias, temperature, checked, tp_group)
    logprob, ids = _results("linear_sample", arguments, Sample(seed))
    return SampledIds(ids, logprob)


def _arguments(
    hidden: Tensor,
    weight: Tensor,
    labels: Any,
    bias: Tensor | None,
    temperature: float | Tensor,
    options: LossOptions,
    tp_group: dist.ProcessGroup | None,
) -> Arguments:
    """Return the arguments; without labels these are None until tokens can be counted."""
    return Arguments(hidden, weight, labels, bias, None, temperature, options, tp_group)


def _results(name: str, arguments: Arguments, schedule: TopK | Sample) -> tuple[Any, ...]:
    """Return what the function of this name does, in the shape of the caller's tokens."""
    with refusals_told(name, arguments.tp_group, arguments.hidden):
        refuse_tracing(name, arguments.hidden)
        check_tensor("hidden", arguments.hidden, FLOATS)
        operands = {"hidden": arguments.hidden, "weight": arguments.weight, "bias": arguments.bias}
        for operand, x in operands.items():
            if torch.is_grad_enabled() and getattr(x, "requires_grad", False):
                raise NotImplementedError(
                    f"{name} has no gradients, got {operand} with requires_grad=True: call it "
                    "under torch.no_grad(), and linear_logprob at its ids for log-probabilities "
                    "that have"
                )
    run = outside_graphs(_run, name)
    return run(name, arguments, schedule)


@torch.no_grad()
def _run(name: str, arguments: Arguments, schedule: TopK | Sample) -> tuple[Any, ...]:
    with refusals_told(name, arguments.tp_group, arguments.hidden):
        if may_have_dtensors(arguments):
            arguments = localized(arguments)
        hidden, weight, labels, bias, _, temperature, options, tp_group = arguments
        tokens = shape_of_tokens(hidden, options, tp_group)
        numbers = torch.arange(math.prod(tokens), device=hidden.device).view(tokens)
        if labels is None:
            labels = numbers
        elif isinstance(schedule, Sample):
            check_tensor("counters", labels, LABELS, hidden)
            if labels.shape != numbers.shape:
                raise ValueError(
                    f"counters must be {tuple(numbers.shape)}, as tokens, got {tuple(labels.shape)}"
                )
        temperatures = tempered(temperature, labels)
        ordered, _ = settled(
            Arguments(hidden, weight, labels, bias, None, temperatures, options, tp_group)
        )
        call, operands = prepare(ordered, NO_GRADIENT)
    forward_alone: Any = schedule.sized(call)
    call = replace(call, schedule=forward_alone)
    check_alike(name, call, operands)
    first, others, _ = run_forward(call, forward_alone.operands(call, operands))
    shape = ordered.labels.shape
    results = [None if x is None else x.view((*shape, *x.shape[1:])) for x in (first, *others)]
    return in_callers_order(results, ordered, arguments)
