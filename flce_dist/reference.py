"""The textbook version, single-rank and tensor-parallel: logits, log-softmax, plain autograd.

This is the oracle of the tests and of ``launch.verify``: a few obvious lines that materialise all
logits and are differentiated by autograd. In fp64 it gives the truth, in the training dtype the
error of eager PyTorch. Under tensor parallelism it gathers the whole weight and hidden, so each
rank computes what one GPU would.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flce_dist.parallel.collectives import all_reduce_max, all_reduce_sum


def reference_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    vocab_range: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``(loss, lse, logprob, entropy, correct)``; arguments as ``linear_cross_entropy``.

    Logits [T, V_all] are materialised in the dtype of the inputs, as in eager PyTorch; everything
    after them is computed in fp32 (fp64 for fp64 inputs).
    """
    if tp_group is not None:
        weight = _all_rows(weight, vocab_range, tp_group)
        bias = None if bias is None else _all_rows(bias, vocab_range, tp_group)
        hidden = _all_rows(hidden, None, tp_group) if sequence_parallel else hidden

    # NaN in an ignored row must not reach the loss, nor (as 0 * NaN) any gradient.
    counted = labels != ignore_index
    hidden = hidden.where(counted[..., None], 0.0)
    labels = labels.where(counted, 0)[..., None].long()

    V_all = weight.shape[0] if vocab_size is None else vocab_size
    logits = _logits(
        hidden, weight[:V_all], bias, logit_scale, softcap, temperature, counted[..., None]
    )
    dtype = logits.dtype
    lse = logits.logsumexp(-1)
    logprob = F.log_softmax(logits, dim=-1)
    label_logprob = logprob.gather(-1, labels).squeeze(-1)
    # A column banned by a bias of -inf contributes 0, but 0 * -inf would be NaN.
    entropy = -(logprob.exp() * logprob.clamp_min(-1e30)).sum(-1)
    correct = (logits.gather(-1, labels).squeeze(-1) >= logits.amax(-1)) & counted

    loss = -(1 - label_smoothing) * label_logprob + z_loss_weight * lse.square()
    if label_smoothing:
        loss = loss - label_smoothing * logprob.mean(-1)
    token_weight = torch.ones_like(loss) if token_weight is None else token_weight.to(dtype)
    loss = loss * token_weight
    loss, lse, label_logprob, entropy, token_weight = (
        x.where(counted, 0.0) for x in (loss, lse, label_logprob, entropy, token_weight)
    )
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        loss = loss.sum() / token_weight.sum().where((token_weight != 0).any(), 1.0)
    return loss, lse, label_logprob, entropy, correct


def reference_linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    offsets: Tensor | None = None,
    over: str = "vocabulary",
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    vocab_range: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(logprob, lse, other, entropy)``; arguments as ``linear_logprob``.

    With ``over="ids"`` other is -inf. Logits as in ``reference_linear_cross_entropy``.
    """
    if tp_group is not None:
        weight = _all_rows(weight, vocab_range, tp_group)
        bias = None if bias is None else _all_rows(bias, vocab_range, tp_group)
        hidden = _all_rows(hidden, None, tp_group) if sequence_parallel else hidden
    tokens, flat = hidden.shape[:-1], ids.reshape(-1).long()
    T, V_all = tokens.numel(), weight.shape[0] if vocab_size is None else vocab_size
    each = len(flat) // max(1, T) if offsets is None else offsets.diff()
    token = torch.arange(T, device=ids.device).repeat_interleave(each)
    is_id = flat >= 0
    named = torch.zeros(T, V_all, dtype=torch.bool, device=ids.device)
    named[token[is_id], flat[is_id]] = True
    counted = named.any(1)

    hidden = hidden.reshape(T, hidden.shape[-1]).where(counted[:, None], 0.0)
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(T)
    logits = _logits(
        hidden, weight[:V_all], bias, logit_scale, softcap, temperature, counted[:, None]
    )
    if over == "ids":
        logits = logits.where(named | ~counted[:, None], -torch.inf)
    logprob, lse = F.log_softmax(logits, dim=-1), logits.logsumexp(-1)
    entropy = -(logprob.exp() * logprob.clamp_min(-1e30)).sum(-1)
    # Where nothing is left, logsumexp has no gradient but NaN.
    some = ~named.all(1) if over == "vocabulary" else torch.zeros_like(counted)
    others = logprob.where(~named, -torch.inf).where(some[:, None], 0.0)
    other = others.logsumexp(-1).where(some, -torch.inf)
    of_ids = logprob[token, flat.where(is_id, 0)].where(is_id, 0.0)
    lse, other, entropy = (x.where(counted, 0.0).view(tokens) for x in (lse, other, entropy))
    return of_ids.view(ids.shape), lse, other, entropy


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    temperature: float | Tensor,
    counted: Tensor,
) -> Tensor:
    """Return logits [..., V_all], computed in the dtype of hidden, in fp32 or fp64."""
    logits = hidden @ weight.T * logit_scale
    if bias is not None:
        logits = logits + bias[: len(weight)]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits.dtype)[..., None].where(counted, 1.0)
    return logits / temperature


def _all_rows(rows: Tensor, here: tuple[int, int] | None, group: dist.ProcessGroup) -> Tensor:
    """Return every rank's rows in the order of their ranges; those of even shards are None.

    All ranks then compute the same loss from the same numbers, so the gradient of a rank's own rows
    is already complete and needs no sum over ranks.
    """
    start = dist.get_rank(group) * len(rows) if here is None else here[0]
    end = start + len(rows)
    whole = all_reduce_max(torch.tensor(end, device=rows.device), group)
    every = rows.new_zeros(int(whole), *rows.shape[1:])
    every[start:end] = rows.detach()
    all_reduce_sum(every, group)
    every[start:end] = rows
    return every
