"""Filtered gradients by their definition, in dense fp64 matrices, and a problem to filter.

T tokens, V vocabulary rows, H hidden size. A tile is 128 tokens by 256 rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.problems import IGNORE, Inputs, Outcome, Upstream, run_reference

NOT_OF_THE_REFERENCE = ("filter_eps", "schedule", "max_logits_bytes", "impl")


def zipf_inputs(
    T: int = 512, V: int = 5000, H: int = 32, dtype: torch.dtype = torch.float32, *,
    bias: bool = False, token_weight: bool = False, ignored: float = 0.1,
) -> Inputs:  # fmt: skip
    """A model that knows how frequent each row is, and a little more; labels are drawn from it.

    Rows lie in order of frequency, which the first feature of hidden carries.
    """
    g = torch.Generator().manual_seed(T + V + H)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g) / H**0.5
    hidden[:, 0], weight[:, 0] = 1.0, -1.5 * torch.arange(V).add(4.0).log()
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    labels = torch.multinomial((hidden.float() @ weight.float().T).softmax(1), 1, generator=g)[:, 0]
    labels[torch.rand(T, generator=g) < ignored] = IGNORE
    return Inputs(
        hidden,
        weight,
        labels,
        bias=(0.3 * torch.randn(V, generator=g)).to(dtype) if bias else None,
        token_weight=torch.rand(T, generator=g) * 2 - 0.5 if token_weight else None,
    )


class Probabilities(NamedTuple):
    """What the gradients take for the probabilities, [T, V]."""

    p: Tensor
    kept: Tensor  # [blocks, tiles] bool
    mass: float  # mean over counted tokens of the probability that is not kept


def probabilities(
    inputs: Inputs, eps: float, *, logit_scale: float = 1.0, vocab_size: int | None = None,
    starts: Sequence[int] = (0,), drops: bool = False, **_: Any,
) -> Probabilities:  # fmt: skip
    """Replace tiles that are not kept by mass times profile, or by 0 if ``drops``.

    ``starts`` are the first rows of the ranks' shards, from which tiles are counted.
    """
    V = vocab_size or len(inputs.weight)
    p = logits(inputs, V, logit_scale).softmax(1)
    counted = (inputs.labels != IGNORE)[:, None]
    is_label = torch.arange(V, device=p.device) == inputs.labels[:, None]
    ends = [min(end, V) for end in (*starts[1:], V)]
    tiles = [
        slice(v, min(v + 256, end))
        for start, end in zip(starts, ends, strict=True)
        for v in range(start, end, 256)
    ]
    blocks = [slice(t, t + 128) for t in range(0, len(p), 128)]
    step = -(-len(p) // 128)
    kept = torch.zeros(len(blocks), len(tiles), dtype=torch.bool)
    result, total = p.clone(), p.new_zeros(len(p), 1)
    for j, tile in enumerate(tiles):
        left_out = counted.clone()
        for b, block in enumerate(blocks):
            largest = p[block, tile].where(counted[block] & ~is_label[block, tile], 0.0).max()
            assert abs(largest / eps - 1) > 1e-5, "a probability too near to eps"
            kept[b, j] = largest >= eps or is_label[block, tile].where(counted[block], False).any()
            left_out[block] &= ~kept[b, j]
        q = p[::step, tile].where(left_out[::step], 0.0).sum(0)
        if not q.any():
            q = torch.ones_like(q)
            if inputs.bias is not None:
                q[inputs.bias[tile] == -torch.inf] = 0.0
        mass = p[:, tile].where(left_out, 0.0).sum(1, keepdim=True)
        rank_one = mass * q / q.sum().clamp_min(1e-300)
        result[:, tile] = torch.where(left_out, 0.0 if drops else rank_one, p[:, tile])
        total += mass
    return Probabilities(result, kept, float(total.sum() / counted.sum().clamp_min(1)))


def logits(inputs: Inputs, V: int, logit_scale: float = 1.0) -> Tensor:
    """[T, V] in fp64, 0 where ignored."""
    hidden = inputs.hidden.double().where((inputs.labels != IGNORE)[:, None], 0.0)
    z = logit_scale * hidden @ inputs.weight[:V].double().T
    return z if inputs.bias is None else z + inputs.bias[:V].double()


def filtered_gradients(
    inputs: Inputs, eps: float, upstream: Upstream | None = None, **options: Any
) -> Outcome:
    """Gradients in fp64, with the probabilities replaced; ``drops`` and ``starts`` as above."""
    p, _, _ = probabilities(inputs, eps, **options)
    return gradients_of(p, inputs, upstream or Upstream(), **options)


def gradients_of(
    p: Tensor, inputs: Inputs, upstream: Upstream, *, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss_weight: float = 0.0, logit_scale: float = 1.0,
    **_: Any,
) -> Outcome:  # fmt: skip
    """Gradients in fp64 if the probabilities were ``p`` [T, V]."""
    V, counted = p.shape[1], inputs.labels != IGNORE
    lse = logits(inputs, V, logit_scale).logsumexp(1)
    weights = counted.double()
    if inputs.token_weight is not None:
        weights = weights * inputs.token_weight.double()
    assert upstream.loss is not None
    g = torch.as_tensor(upstream.loss).to(weights) * weights
    if reduction == "mean":
        g = g / weights.sum()
    is_label = (torch.arange(V, device=p.device) == inputs.labels[:, None]).double()
    dz = p * (1 + 2 * z_loss_weight * lse)[:, None]
    dz = g[:, None] * (dz - (1 - label_smoothing) * is_label - label_smoothing / V)
    hidden = inputs.hidden.double().where(counted[:, None], 0.0)
    rest = len(inputs.weight) - V
    dweight = logit_scale * dz.T @ hidden
    outcome = {
        "dhidden": logit_scale * dz @ inputs.weight[:V].double(),
        "dweight": torch.cat((dweight, dweight.new_zeros(rest, dweight.shape[1]))),
    }
    if inputs.bias is not None:
        outcome["dbias"] = torch.cat((dz.sum(0), dz.new_zeros(rest)))
    return outcome


def exact(
    inputs: Inputs, dtype: torch.dtype, upstream: Upstream | None = None, **options: Any
) -> Outcome:
    """Loss and gradients of the reference."""
    kept = {name: x for name, x in options.items() if name not in NOT_OF_THE_REFERENCE}
    hidden = inputs.hidden.where((inputs.labels != IGNORE)[:, None], 0.0)
    return run_reference(replace(inputs, hidden=hidden).to(dtype), upstream or Upstream(), **kept)
