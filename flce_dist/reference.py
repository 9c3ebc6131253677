"""The textbook version: logits, log-softmax, plain autograd, all tokens and the whole vocabulary.

The oracle of the tests and of ``launch.verify``: a few obvious lines that materialise all logits.
In fp64 autograd gives the truth, in the training dtype the error of eager PyTorch.
"""

from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack


class LogitOptions(TypedDict, total=False):
    """What the logits are made of, beside hidden and weight; as for ``linear_cross_entropy``."""

    bias: Tensor | None
    softcap: float | None
    logit_scale: float
    temperature: float | Tensor
    vocab_size: int | None


def reference_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    token_weight: Tensor | None = None,
    **of_logits: Unpack[LogitOptions],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``(loss, lse, logprob, entropy, correct)``; arguments as ``linear_cross_entropy``.

    Args:
        hidden, weight, labels: whole tensors: [..., H], [V_all and padding, H] and [...].
        **of_logits: bias, softcap, logit_scale, temperature and vocab_size.

    Returns:
        The loss, a scalar or [...] by reduction, and [...] each of the others, correct as bool.
        Logits [..., V_all] are materialised in the dtype of the inputs, as in eager PyTorch; all
        after them is computed in fp32 (fp64 for fp64 inputs). All but correct have a graph.
    """
    counted = labels != ignore_index
    labels = labels.where(counted, 0)[..., None].long()
    logits = _logits(hidden, weight, counted, **of_logits)
    lse, logprob, entropy = _statistics(logits)
    label_logprob = logprob.gather(-1, labels).squeeze(-1)
    correct = (logits.gather(-1, labels).squeeze(-1) >= logits.amax(-1)) & counted

    loss = -(1 - label_smoothing) * label_logprob
    if z_loss_weight:
        loss = loss + z_loss_weight * lse.square()
    if label_smoothing:
        loss = loss - label_smoothing * logprob.mean(-1)
    token_weight = _weights(token_weight, loss, counted)
    loss = loss * token_weight
    loss, lse, label_logprob, entropy = (
        x.where(counted, 0.0) for x in (loss, lse, label_logprob, entropy)
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
    **of_logits: Unpack[LogitOptions],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(logprob, lse, other, entropy)``; arguments as ``linear_logprob``.

    logprob has the shape of ids, the others [...]. With ``over="ids"`` other is -inf. Logits as in
    ``reference_linear_cross_entropy``.
    """
    tokens = hidden.shape[:-1]
    flat = ids.reshape(-1).long()
    T = tokens.numel()
    ids_of_token = len(flat) // max(1, T) if offsets is None else offsets.diff()
    token = torch.arange(T, device=ids.device).repeat_interleave(ids_of_token)
    is_id = flat >= 0
    counted = torch.zeros(T, dtype=torch.bool, device=ids.device)
    counted[token[is_id]] = True

    logits = _logits(hidden, weight, counted.view(tokens), **of_logits)
    logits = logits.reshape(T, logits.shape[-1])
    named = torch.zeros_like(logits, dtype=torch.bool)
    named[token[is_id], flat[is_id]] = True
    if over == "ids":
        logits = logits.where(named | ~counted[:, None], -torch.inf)
    lse, logprob, entropy = _statistics(logits)
    # Where nothing is left, logsumexp has no gradient but NaN: of a whole row alone that is meant.
    is_left = (logits > -torch.inf) & ~named if over == "vocabulary" else torch.zeros_like(named)
    has_unnamed = is_left.any(1)
    of_unnamed = logprob.where(is_left, -torch.inf).where(has_unnamed[:, None], 0.0)
    other = of_unnamed.logsumexp(-1).where(has_unnamed, -torch.inf)
    other = other.where(lse != -torch.inf, logprob[:, 0])  # NaN, and so is its gradient
    of_ids = logprob[token, flat.where(is_id, 0)].where(is_id, 0.0)
    lse, other, entropy = (x.where(counted, 0.0).view(tokens) for x in (lse, other, entropy))
    return of_ids.view(ids.shape), lse, other, entropy


def reference_linear_top_k(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    top_p: float | None = None,
    **of_logits: Unpack[LogitOptions],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return ``(ids, logprob, lse, label_logprob, label_rank)``; arguments as ``linear_top_k``.

    ids and logprob are [..., k], the others [...], the last two None without labels. By a stable
    sort of all logits, which are as in ``reference_linear_cross_entropy``.
    """
    counted = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
    if labels is not None:
        counted = labels != ignore_index
    logits = _logits(hidden, weight, counted, **of_logits)
    lse = logits.logsumexp(-1)
    in_order, order = logits.sort(dim=-1, descending=True, stable=True)
    logprob = in_order - lse[..., None]
    is_id = (in_order > -torch.inf) & (counted & lse.isfinite())[..., None]
    if top_p is not None:
        p = logprob.exp()
        is_id &= p.cumsum(-1) - p < top_p
    missing = (0, max(0, k - logits.shape[-1]))
    ids = F.pad(order.where(is_id, -1), missing, value=-1)[..., :k]
    best = F.pad(logprob.where(is_id, -torch.inf), missing, value=-torch.inf)[..., :k]
    best = best.masked_fill((counted & lse.isnan())[..., None], torch.nan)
    if labels is None:
        return ids, best, lse, None, None
    place = labels.where(counted, 0)[..., None].long()
    of_label = (logits.gather(-1, place)[..., 0] - lse).where(counted, 0.0)
    rank = (order == place).int().argmax(-1).where(counted & ~lse.isnan(), -1)
    return ids, best, lse.where(counted, 0.0), of_label, rank


def reference_linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: str = "reverse_kl",
    beta: float = 0.5,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    teacher_rows: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_temperature: float | Tensor | None = None,
    **of_logits: Unpack[LogitOptions],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``(loss, entropy, teacher_entropy, same_best, overlap)``; arguments as
    ``linear_divergence``, logits as in ``reference_linear_cross_entropy``.

    The loss is a scalar or [...] by reduction; the others are [...], same_best as bool.
    """
    counted = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
    if labels is not None:
        counted = labels != ignore_index
    temperature = of_logits.get("temperature", 1.0)
    if teacher_rows is not None:
        teacher_weight = teacher_weight[teacher_rows]
        teacher_bias = None if teacher_bias is None else teacher_bias[teacher_rows]
    with torch.no_grad():
        teacher_logits = _logits(
            teacher_hidden,
            teacher_weight,
            counted,
            bias=teacher_bias,
            softcap=teacher_softcap,
            logit_scale=teacher_logit_scale,
            vocab_size=of_logits.get("vocab_size"),
            temperature=temperature if teacher_temperature is None else teacher_temperature,
        )
    logits = _logits(hidden, weight, counted, **of_logits)
    _, log_p, entropy = _statistics(logits)
    _, log_q, teacher_entropy = _statistics(teacher_logits.to(logits.dtype))
    p = log_p.exp()
    q = log_q.exp()

    if kind == "forward_kl":
        value = _expected(q, log_q - log_p)
    elif kind == "reverse_kl":
        value = _expected(p, log_p - log_q)
    elif kind == "jsd":
        log_m = (beta * q + (1 - beta) * p).clamp_min(torch.finfo(p.dtype).tiny).log()
        value = beta * _expected(q, log_q - log_m) + (1 - beta) * _expected(p, log_p - log_m)
    else:
        value = (p - q).clamp_min(0.0).sum(-1)
    overlap = torch.minimum(p, q).sum(-1)
    same_best = (logits.argmax(-1) == teacher_logits.argmax(-1)) & counted & ~overlap.isnan()

    token_weight = _weights(token_weight, value, counted)
    loss, entropy, teacher_entropy, overlap = (
        x.where(counted, 0.0) for x in (value * token_weight, entropy, teacher_entropy, overlap)
    )
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        loss = loss.sum() / token_weight.sum().where((token_weight != 0).any(), 1.0)
    return loss, entropy, teacher_entropy, same_best, overlap


def _weights(token_weight: Tensor | None, loss: Tensor, counted: Tensor) -> Tensor:
    """Return the weight of each token, 0 where it is ignored, even if it is NaN there."""
    weights = torch.ones_like(loss) if token_weight is None else token_weight.to(loss.dtype)
    return weights.where(counted, 0.0)


def _expected(p: Tensor, x: Tensor) -> Tensor:
    """Return ``sum_v p_v x_v`` without the terms in which p is 0, where x may be infinite."""
    return (p * x.where(p != 0.0, 0.0)).sum(-1)


def _logits(
    hidden: Tensor,
    weight: Tensor,
    counted: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """Return logits [..., V_all], computed in the dtype of hidden, in fp32 or fp64."""
    # NaN in an ignored row must not reach the loss, nor (as 0 * NaN) any gradient.
    logits = hidden.where(counted[..., None], 0.0) @ weight[:vocab_size].T * logit_scale
    if bias is not None:  # a bias of -inf for each id, too, which makes NaN of gradients
        logits = logits + bias[:vocab_size].where(counted[..., None], 0.0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits.dtype).where(counted, 1.0)[..., None]
    return logits / temperature


def _statistics(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return lse, all log-probabilities and the entropy."""
    logprob = F.log_softmax(logits, dim=-1)
    # A column banned by a bias of -inf contributes 0, but 0 * -inf would be NaN.
    entropy = -(logprob.exp() * logprob.clamp_min(-1e30)).sum(-1)
    return logits.logsumexp(-1), logprob, entropy
