"""The functions that people call.  T tokens, V vocabulary rows here, H hidden size, P ranks."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.op import checks
from flce_dist.op import compiled as library
from flce_dist.op.autograd import function_of
from flce_dist.op.dtensor import localized
from flce_dist.op.prepare import Arguments, gradients_needed, in_autocast_dtype, prepare
from flce_dist.options import Impl, LossOptions, Reduction, Schedule


class LossWithMetrics(NamedTuple):
    """Loss, and per token (labels' shape) what the same pass over the logits yields.

    Every rank of the tensor-parallel group holds the same values. Ignored tokens hold 0 and False.
    """

    loss: Tensor  # fp32 (fp64 for fp64 inputs), scalar or labels' shape by reduction
    lse: Tensor  # log-sum-exp of the logits, fp32, differentiable
    logprob: Tensor  # log-probability of the label, fp32, differentiable
    entropy: Tensor  # of the predicted distribution in nats, fp32, differentiable
    correct: Tensor  # bool: no other logit is above the label's


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    reduce_dhidden: bool = True,
    reduce_in_fp32: bool = False,
    tp_invariant: bool = False,
    vocab_range: tuple[int, int] | None = None,
    schedule: Schedule = "auto",
    max_logits_bytes: int | None = None,
    impl: Impl | None = None,
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T`` against labels, without materialising the logits.

    With ``z = softcap(logit_scale * (h . w) + b)`` and lse the log-sum-exp of z over the whole
    vocabulary, each token's loss is::

        lse - (1 - label_smoothing) * z_label - label_smoothing / V_all * sum_v z_v
            + z_loss_weight * lse^2

    Args:
        hidden: [..., H] last hidden states, fp32, bf16, fp16 (or fp64 with impl="eager"). The same
            on every rank, or under ``sequence_parallel`` this rank's [T / P, ..., H], of which
            rank order along the first dimension makes the whole.
        weight: [V, H] output projection, hidden's dtype; this rank's rows of the vocabulary.
        labels: [...] int64 or int32 global ids; the same whole tensor on every rank.
        bias: [V], this rank's. -inf bans a column: its probability and its gradient are 0. The loss
            of a token with that label is inf; its gradient stays finite, as PyTorch's does.
        reduction: "none" (labels' shape), "sum" or "mean" (over the sum of token_weight).
        ignore_index: label of tokens that contribute nothing, whatever their hidden states hold.
        label_smoothing: weight of the uniform distribution over the whole true vocabulary.
        z_loss_weight: weight of ``lse^2``.
        softcap: c of ``c * tanh(z / c)``; None for none.
        logit_scale: factor of ``h . w``, before the bias.
        token_weight: float, labels' shape, the same on every rank; a factor of each token's loss,
            of any sign, rounded to fp32 (fp64 for fp64 hidden; an fp64 weight beyond fp32 is inf
            there). "mean" divides by the sum over counted tokens, whatever that is: inf or NaN
            where it is 0 while some weight is not. If all these weights are 0, or no token is
            counted, the loss and its gradients are 0. NaN reaches what its token takes part in. The
            weights of ignored tokens are not read.
        vocab_size: true size V_all of the whole vocabulary where the weight is padded; rows at or
            beyond it are excluded everywhere and get a zero gradient. Default: all rows.
        tp_group: ranks among which the vocabulary is split; None for one process.
        sequence_parallel: hidden is split by token over ``tp_group``.
        reduce_dhidden: sum dhidden over ``tp_group`` in backward; False leaves that to the caller
            (one who wraps hidden in Megatron's copy_to_tensor_model_parallel_region).
        reduce_in_fp32: send dhidden in fp32 and round the sum once; else each rank's share is
            rounded to hidden's dtype and summed in it, at half of the bytes.
        tp_invariant: loss, lse, logprob and entropy are bitwise the same for any number of ranks,
            schedule and budget, at a few percent of the time of the logits. Shards must begin at
            multiples of 32 rows, and impl be "triton". dhidden and dweight round as ever.
        vocab_range: half-open rows (start, end) of this rank, for uneven shards; by default rank r
            holds rows [r * V, (r + 1) * V). Needs vocab_size.
        schedule: what backward does for the probabilities. "recompute" computes logits again,
            "cached" keeps exponentials [T, V] in hidden's dtype (in bf16 for fp16), "in_forward"
            makes both gradients in forward, a chunk of tokens at a time, and allows a scalar
            upstream gradient; "auto" caches what fits into ``max_logits_bytes`` and recomputes
            the rest, or is in_forward if these bytes hold all tokens at once, or chunks of them and
            what dweight's accumulator takes beyond dweight, and reduction is "mean" or "sum"
            without metrics (not under torch.compile).
        max_logits_bytes: bound on what is held of the [T, V] logits on this rank, in bytes. Must be
            the same on all ranks. Default: 1 GiB for in_forward; for auto 1 GiB or, if logits would
            be computed again within that, half of the fp32 logits of up to 16,384 tokens, less if
            in_forward can do with less; else none.
        impl: "triton", "eager", or by default triton on a GPU and eager elsewhere.

    Returns:
        The loss, fp32 (fp64 for fp64 inputs), bitwise the same on every rank. Every rank of
        ``tp_group`` should start backward from it with the same upstream gradient: each uses its
        own for its share and for its own tokens, so that different ones give the gradient of no
        one function.

        Loss and metrics are plain tensors, also of DTensors. Operands may be DTensors: weight and
        bias with Shard(0) over ``tp_group`` (uneven and empty shards too; ``vocab_range`` is then
        not passed) or, without a group, Replicate; hidden with Replicate or, under
        ``sequence_parallel``, Shard(0) over ``tp_group``; labels and token_weight with Replicate.
        Gradients have their operand's mesh and placements; dhidden is Partial with
        ``reduce_dhidden=False``. Over mesh dimensions other than the group's, DTensors must be
        replicated and plain tensors the same: no gradient is summed over these.

    Raises:
        ValueError: an argument is wrong; NotImplementedError: a combination is not supported.

    Source: online softmax arXiv:1805.02867, vocabulary parallelism arXiv:1909.08053, sequence
    parallelism arXiv:2205.05198; exponentials relative to the label's logit are ours.
    """
    options = LossOptions(
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss_weight=z_loss_weight,
        softcap=softcap,
        logit_scale=logit_scale,
        vocab_size=vocab_size,
        vocab_range=vocab_range,
        sequence_parallel=sequence_parallel,
        reduce_dhidden=reduce_dhidden,
        reduce_in_fp32=reduce_in_fp32,
        tp_invariant=tp_invariant,
        schedule=schedule,
        max_logits_bytes=max_logits_bytes,
        impl=impl,
    )
    arguments = Arguments(hidden, weight, labels, bias, token_weight, options, tp_group)
    return _apply(arguments)[0]


def linear_cross_entropy_with_metrics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    reduce_dhidden: bool = True,
    reduce_in_fp32: bool = False,
    tp_invariant: bool = False,
    vocab_range: tuple[int, int] | None = None,
    schedule: Schedule = "auto",
    max_logits_bytes: int | None = None,
    impl: Impl | None = None,
) -> LossWithMetrics:
    """``linear_cross_entropy`` and, of the same pass, lse, logprob, entropy and correct per token.

    A gradient through lse, logprob or entropy makes backward recompute the logits of every column,
    cached or not; under "in_forward" it raises. The metrics are of the logits after softcap, and
    free of label smoothing, z-loss and token weights.
    """
    options = LossOptions(
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss_weight=z_loss_weight,
        softcap=softcap,
        logit_scale=logit_scale,
        vocab_size=vocab_size,
        vocab_range=vocab_range,
        sequence_parallel=sequence_parallel,
        reduce_dhidden=reduce_dhidden,
        reduce_in_fp32=reduce_in_fp32,
        tp_invariant=tp_invariant,
        schedule=schedule,
        max_logits_bytes=max_logits_bytes,
        impl=impl,
        with_metrics=True,
    )
    arguments = Arguments(hidden, weight, labels, bias, token_weight, options, tp_group)
    return LossWithMetrics(*_apply(arguments))


def _apply(arguments: Arguments) -> tuple[Tensor, ...]:
    """Prepare, run, give results labels' shape; return loss and, if asked for, metrics."""
    arguments = in_autocast_dtype(localized(arguments))
    needs = gradients_needed(arguments)
    if torch.compiler.is_compiling():
        return library.apply(arguments, needs)

    prepared = prepare(arguments, needs)
    call, *flat = prepared
    checks.check_labels(prepared.labels, call.shard.vocab_size, call.options.ignore_index)
    loss, *metrics = function_of(call).apply(*flat, call)
    shape = arguments.labels.shape
    loss = loss.reshape(shape) if call.options.reduction == "none" else loss
    return loss, *(metric.reshape(shape) for metric in metrics if metric is not None)
