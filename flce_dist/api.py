"""The public functions.  T tokens, V vocabulary rows on this rank, H hidden size, P ranks."""

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from flce_dist import compiled
from flce_dist.arguments.decided_once import checked_options
from flce_dist.arguments.dtensor import localized
from flce_dist.arguments.low_rank import with_low_rank
from flce_dist.arguments.options import (
    CallOptions,
    Impl,
    Reduction,
    ScheduleOption,
    keywords_of,
    signed_like,
)
from flce_dist.arguments.passed import (
    Arguments,
    in_callers_order,
    may_have_dtensors,
    settled,
    tempered,
)
from flce_dist.arguments.prepare import counted_operands, prepare
from flce_dist.arguments.rank_check import check_alike, refusals_told, told_if_unbound
from flce_dist.core.autograd import differentiable, refuse_tracing
from flce_dist.core.call import Call, Operands
from flce_dist.core.interface import LossWithMetrics


@told_if_unbound
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    vocab_range: tuple[int, int] | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    reduce_dhidden: bool = True,
    reduce_in_fp32: bool = False,
    tp_invariant: bool = False,
    accumulate_dweight: bool = False,
    schedule: ScheduleOption = "auto",
    max_logits_bytes: int | None = None,
    max_counted: int | None = None,
    skip_ignored: bool = False,
    impl: Impl | None = None,
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T`` and labels, without materialising the logits.

    With ``z = softcap(logit_scale * (h . w) + b) / temperature`` and lse the log-sum-exp of z over
    the whole vocabulary, the loss of a token is::

        lse - (1 - label_smoothing) * z_label - label_smoothing / V_all * sum_v z_v
            + z_loss_weight * lse^2

    Args:
        hidden: [..., H] last hidden states in fp32, bf16, fp16 (or fp64 with impl="eager"), the
            same on every rank. Under ``sequence_parallel`` this rank's [T / P, ..., H], split along
            ``sequence_dim`` in rank order.
        weight: [V, H] output projection in hidden's dtype; this rank's rows of the vocabulary.
        labels: [...] int64 or int32 global ids; the labels of all tokens, on every rank. At the
            first call of a group its ranks compare labels, options and sizes.
        bias: [V], this rank's part. A bias of -inf bans a column: its probability and gradient are
            0. A token with a banned label has loss inf and a finite gradient, as in PyTorch; if all
            columns are banned, loss and gradients are NaN. With softcap nothing is banned: capped
            logits are -softcap at the least.
        low_rank: (x, b), [..., r] like hidden and [V, r] like weight, in their dtype: logits then
            have ``h . w + x . b`` in place of ``h . w``, as with LoRA on the output layer, whose A
            and scaling make x of hidden, and whose B is b. Where weight needs no gradient, that of
            b takes r columns, and there is no dweight. The call copies weight and b into
            [V, H + r]. Plain tensors; not with accumulate_dweight or filtered gradients.
        reduction: "none" (labels' shape), "sum" or "mean" (divided by the sum of token_weight).
        ignore_index: label of tokens that contribute nothing, even if their hidden states are NaN.
        label_smoothing: weight of the uniform distribution over the true vocabulary.
        z_loss_weight: weight of ``lse^2``, not negative.
        softcap: c of ``c * tanh(z / c)``; None for none.
        logit_scale: factor of ``h . w``, applied before the bias.
        token_weight: float, labels' shape, the same on every rank; a factor of each token's loss,
            of any sign. It is rounded to fp32 (kept in fp64 for fp64 hidden); an fp64 value beyond
            fp32 becomes inf. "mean" divides by the sum of the weights of tokens that are not
            ignored, so it is inf or NaN if the sum is 0 but some weight is not. If all these
            weights are 0, or every token is ignored, the loss and its gradients are 0. A NaN weight
            makes everything NaN that its token contributes to. Ignored tokens' are not read.
        temperature: a number above 0, or float, labels' shape, the same on every rank. Loss, its
            gradients and all metrics are those of the tempered distribution. It gets no gradient.
            A tensor is rounded as token_weight is. A value in it that is not finite and above 0
            is an error, on a GPU a failed device assertion, as is a label outside the vocabulary.
            Values of ignored tokens are not read.
        vocab_size: true size V_all of the whole vocabulary if the weight is padded. Rows from
            ``vocab_size`` on are excluded from the loss and get a zero gradient. Default: all rows.
        vocab_range: half-open rows (start, end) of this rank, for uneven shards; needs vocab_size.
            All ranks of a group pass it, or none. Default: rank r holds rows [r * V, (r + 1) * V).
        tp_group: ranks that share the vocabulary; None, or a group of one, for one process.
        sequence_parallel: hidden is split by token over ``tp_group``.
        sequence_dim: the dimension that ``sequence_parallel`` splits. 1 for hidden [B, S / P, H]
            and labels [B, S]; hidden is copied then. Flattened to [B S / P, H] and [B S] instead,
            tokens would get other tokens' labels.
        reduce_dhidden: sum dhidden over ``tp_group`` in backward. False if the caller does that,
            as Megatron's copy_to_tensor_model_parallel_region around hidden does.
        reduce_in_fp32: sum dhidden over ranks in fp32 and round once. False sends half the bytes:
            each rank rounds its share to hidden's dtype, and the sum is in that dtype.
        tp_invariant: loss, lse, logprob and entropy are bitwise the same for any number of ranks,
            schedule and budget; computing logits takes a few percent longer. Needs impl "triton"
            and shards that begin at multiples of 32 rows. Does not cover dhidden and dweight.
        accumulate_dweight: backward adds dweight into ``weight.main_grad`` by GEMMs that accumulate
            there, and no dweight exists (with in_forward one waits for the upstream gradient).
            main_grad is [V, H] in fp32 or the operands' dtype. Forward captures it; every backward
            that asks for weight's gradient adds to it (``torch.autograd.grad(loss, hidden)`` does
            not), but not to rows from ``vocab_size`` on. weight gets no gradient, or, if it has the
            attribute ``grad_added_to_main_grad``, that becomes True and the gradient is
            zeros, as in Megatron and TransformerEngine. If weight has ``get_main_grad``, backward
            calls that, and overwrites the result unless ``overwrite_main_grad`` is False. Not under
            torch.compile, not for a DTensor weight.
        schedule: how backward obtains the probabilities. "recompute" computes the logits again.
            "cached" keeps exponentials [T, V] in hidden's dtype (bf16 for fp16). "in_forward"
            computes both gradients in forward, one chunk of tokens at a time; the upstream gradient
            must be a scalar, unless hidden alone needs a gradient. "auto" caches what fits into
            ``max_logits_bytes`` and recomputes the rest; it is in_forward instead if the budget
            holds all tokens, or chunks of them and dweight's accumulator beyond dweight itself
            (only with reduction "mean" or "sum", without metrics and outside torch.compile), and
            where hidden alone needs a gradient, as with a frozen head (without metrics): that takes
            two GEMMs. Where the rounding of exponentials would show in gradients, it recomputes
            (docs/performance.md, "Where rounding shows"), and in graphs of torch.export, of which
            one serves any number of tokens, where it would cache. What
            ``flce_dist.filtered.schedule`` returns approximates the gradients, in less time;
            experimental.
        max_logits_bytes: upper bound in bytes on what this rank holds of the [T, V] logits; the
            same on all ranks. A rank with more rows than an even share recomputes columns that do
            not fit. Default for auto and in_forward: 256 MiB where hidden alone needs a gradient,
            else 1 GiB, or if that means computing logits again or several chunks, half of the fp32
            logits of up to 16,384 tokens, or less if in_forward needs less. Otherwise no bound.
        max_counted: upper bound on the tokens that count: whose label is not ``ignore_index`` and
            whose token_weight is not 0. The same on all ranks. Time and memory are then those of so
            many tokens. Others contribute nothing, even if their hidden states are NaN or labels of
            weight 0 wrong; loss, metrics and dhidden have zeros there. So where token_weight is 0,
            a loss made of metrics vanishes, too: an entropy bonus at advantage 0, for example.
            More tokens that count are an error, on a GPU a failed device assertion. Default: all
            tokens are computed.
        skip_ignored: the GPU's time follows the tokens that count, as ``max_counted`` defines them,
            however many they are; memory is that of ``max_counted`` or all. No host waits: launches
            and collectives do not depend on the number. impl "eager" and filtered gradients compute
            all tokens.
        impl: "triton" or "eager". Default: triton on a GPU, eager elsewhere.

    Returns:
        The loss, fp32 (fp64 for fp64 inputs), bitwise the same on every rank of ``tp_group``.
        Gradients are undefined if ranks pass different upstream gradients.

        Operands may be DTensors: weight and bias with Shard(0) over ``tp_group`` (uneven and empty
        shards too; do not pass ``vocab_range``) or, without a group, Replicate; hidden with
        Replicate or, under ``sequence_parallel``, Shard(0) over ``tp_group`` or Shard(1), which
        means ``sequence_dim=1``; labels, token_weight and temperature with Replicate. Loss and
        metrics are plain tensors. Gradients have the mesh and placements of their operand; dhidden
        is Partial with ``reduce_dhidden=False``. Over other mesh dimensions DTensors must be
        replicated and plain tensors equal on all ranks; gradients are not summed over them.

        A parameter that FSDP2 has sharded is gathered where the loss is called outside forward, in
        hidden's dtype, and held until backward. Its gradient is averaged over the data ranks, or
        divided as the module's ``set_gradient_divide_factor`` says. Not under torch.compile.

    Raises:
        ValueError: an argument is wrong. NotImplementedError: a combination is not supported.

    Example::

        hidden = torch.randn(16, 64, requires_grad=True)
        weight = torch.randn(1000, 64, requires_grad=True)
        labels = torch.randint(1000, (16,))
        loss = linear_cross_entropy(hidden, weight, labels)
        loss.backward()  # hidden.grad [16, 64] and weight.grad [1000, 64]

    Source: online softmax arXiv:1805.02867, vocabulary parallelism arXiv:1909.08053, sequence
    parallelism arXiv:2205.05198; exponentials relative to the label's logit are ours.
    """
    with refusals_told("linear_cross_entropy", tp_group, hidden):
        checked = checked_options(
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss_weight=z_loss_weight,
            softcap=softcap,
            logit_scale=logit_scale,
            vocab_size=vocab_size,
            vocab_range=vocab_range,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            reduce_dhidden=reduce_dhidden,
            reduce_in_fp32=reduce_in_fp32,
            tp_invariant=tp_invariant,
            accumulate_dweight=accumulate_dweight,
            schedule=schedule,
            max_logits_bytes=max_logits_bytes,
            max_counted=max_counted,
            skip_ignored=skip_ignored,
            impl=impl,
        )
        temperatures = tempered(temperature, labels)
    arguments = Arguments(
        hidden, weight, labels, bias, token_weight, temperatures, checked, tp_group
    )
    return apply("linear_cross_entropy", arguments, low_rank)[0]


@signed_like(linear_cross_entropy)
@told_if_unbound
def linear_cross_entropy_with_metrics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    token_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    **options: Unpack[CallOptions],
) -> LossWithMetrics:
    """``linear_cross_entropy`` that also returns lse, logprob, entropy and correct of each token.

    Metrics use the logits after softcap and temperature, without label smoothing, z-loss and token
    weights. If a gradient other than 0 arrives through the entropy, backward computes all logits
    again, even cached columns; with schedule="in_forward" one through lse, logprob or entropy
    raises. Where hidden alone needs a gradient, ``linear_logprob`` of one id gives lse and logprob
    by two GEMMs, without the entropy. With ``flce_dist.filtered.schedule`` the result is
    ``flce_dist.filtered.FilteredLossWithMetrics``.

    Example::

        out = linear_cross_entropy_with_metrics(hidden, weight, labels)
        out.loss.backward()
        accuracy = out.correct.float().mean()
    """
    function = "linear_cross_entropy_with_metrics"
    with refusals_told(function, tp_group, hidden):
        checked = checked_options(
            **keywords_of(linear_cross_entropy_with_metrics, options, with_metrics=True)
        )
        temperatures = tempered(temperature, labels)
    arguments = Arguments(
        hidden, weight, labels, bias, token_weight, temperatures, checked, tp_group
    )
    schedule = checked.schedule
    results = LossWithMetrics if isinstance(schedule, str) else schedule.results
    return results(*apply(function, arguments, low_rank))


def apply(
    function: str, arguments: Arguments, low_rank: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, ...]:
    """Run a call with checked options; return the loss and any metrics in labels' shape."""
    weight = arguments.weight  # as the caller passed it
    with refusals_told(function, arguments.tp_group, arguments.hidden):
        refuse_tracing(function, arguments.hidden)
        if may_have_dtensors(arguments):
            arguments = localized(arguments)
        last_columns = None
        low_rank_columns = 0
        if low_rank is not None:
            arguments, last_columns = with_low_rank(arguments, low_rank)
            low_rank_columns = low_rank[1].shape[1]
    if torch.compiler.is_compiling():
        ordered, needs = settled(arguments, last_columns)
        results = compiled.apply(ordered, needs, last_columns)
    else:
        ordered, call, operands = _prepared_alike(
            function, arguments, last_columns, low_rank_columns
        )
        flat = differentiable(call, counted_operands(call, operands), weight)
        shape = ordered.labels.shape
        results = tuple(x.reshape(shape) if x.dim() else x for x in flat if x is not None)
    return in_callers_order(results, ordered, arguments)


def _prepared_alike(
    function: str, arguments: Arguments, last_columns: Tensor | None, low_rank_columns: int
) -> tuple[Arguments, Call, Operands]:
    """Prepare a call; all ranks raise if one refuses its arguments, or if they differ."""
    with refusals_told(function, arguments.tp_group, arguments.hidden):
        ordered, needs = settled(arguments, last_columns)
        call, operands = prepare(ordered, needs, last_columns=last_columns)
    check_alike(function, call, operands, low_rank_columns=low_rank_columns)
    return ordered, call, operands
