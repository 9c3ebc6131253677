"""The inputs of ``verify``: numbers that break losses, and numbers that are to be filtered.

T = tokens, H = hidden size, P = ranks.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flce_dist import vocab_range
from flce_dist.launch.verify.cases import METRICS, Shape, Variant, round_up


@dataclass(frozen=True)
class Data:
    """Whole inputs and upstream gradients, the same on every rank."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    token_weight: Tensor | None
    temperature: Tensor | None
    dloss: Tensor
    dmetrics: Tensor  # [3, T]
    ids: Tensor | None  # [T, 5] of scores, without an id where the token is ignored
    teacher: dict[str, Tensor]  # hidden, weight and bias of a divergence's, by keyword
    vocab_size: int


def make_data(
    variant: Variant, shape: Shape, P: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Data:
    """Draw inputs, among them the tokens that break losses.

    Confident tokens, tokens whose loss is beyond exp's range, ignored tokens that hold NaN, and
    the first and last row of each shard as labels; or inputs to filter. The first token counts
    and is like most. T and the vocabulary are rounded up to multiples of P, the vocabulary of
    uneven shards to one row more.
    """
    T = round_up(shape.T, P)
    H = shape.H
    rows = round_up(shape.V_all, P) + variant.uneven
    vocab_size = rows - variant.padding
    generator = torch.Generator().manual_seed(seed)

    hidden = torch.randn(T, H, generator=generator)
    weight = torch.randn(rows, H, generator=generator) * (1.5 / H**0.5)
    bias = torch.randn(rows, generator=generator)
    labels = torch.randint(vocab_size, (T,), generator=generator)
    bounds = [vocab_range(rows, r, P) for r in range(P)]
    if variant.filtered:
        shards = [(start, min(end, vocab_size)) for start, end in bounds]
        _make_tiles(hidden, weight, bias, labels, shards, generator)
    else:
        edges = [row for start, end in bounds for row in (start, end - 1) if row < vocab_size][:T]
        labels[: len(edges)] = torch.tensor(edges)
        _aim(hidden, weight, labels, {**dict.fromkeys(range(2, T, 4), 12.0), T // 2: -150.0})
    share = 0.8 if variant.counted or variant.skips else 0.1
    ignored = torch.rand(T, generator=generator) < share
    ignored[0] = False
    labels[ignored] = -100
    hidden[ignored] = torch.nan
    weight[vocab_size:] *= 100.0  # would be seen, if it were

    ids = None
    if variant.over is not None:  # the label, another, the label once more, an edge, padding
        ids = torch.randint(vocab_size, (T, 5), generator=generator)
        ids[:, 0] = ids[:, 2] = labels
        ids[:, 3] = bounds[-1][0]
        ids[::3, 4] = -1
        ids[ignored] = -1
    teacher = {}
    if variant.divergence is not None:
        teacher["teacher_hidden"] = torch.randn(T, H + 5, generator=generator)
        teacher["teacher_hidden"][ignored] = torch.nan
        teacher["teacher_weight"] = torch.randn(rows, H + 5, generator=generator) / H**0.5
        if variant.bias:
            teacher["teacher_bias"] = torch.randn(rows, generator=generator)
    token_weight, temperature = torch.rand(2, T, generator=generator)
    # Upstream of a mean as large as a loss scale makes it: of order 1 for each token.
    dloss = torch.tensor(0.7 * T if variant.reduction == "mean" else 0.7)
    if variant.reduction == "none":
        dloss = torch.randn(T, generator=generator)
    return Data(
        hidden=hidden.to(device, dtype), weight=weight.to(device, dtype), labels=labels.to(device),
        bias=bias.to(device, dtype) if variant.bias else None,
        token_weight=token_weight.to(device) if variant.token_weight else None,
        temperature=(0.9 + 0.2 * temperature).to(device) if variant.tempered else None,
        dloss=dloss.to(device),
        dmetrics=torch.randn(len(METRICS), T, generator=generator).to(device),
        ids=None if ids is None else ids.to(device),
        teacher={name: x.to(device, dtype) for name, x in teacher.items()}, vocab_size=vocab_size,
    )  # fmt: skip


def _aim(hidden: Tensor, weight: Tensor, labels: Tensor, logits: dict[int, float]) -> None:
    """Give tokens, the keys, these label logits by stretching hidden and weight alike.

    A vector much longer than the others would rule every RMS and hide errors elsewhere. Of tokens
    with one label the last is aimed: an indexed write to one row twice has no order, and the ranks
    would hold different weights.
    """
    last = {label: token for token, label in enumerate(labels.tolist()) if token in logits}
    tokens = torch.tensor(list(last.values()), dtype=torch.long)
    if len(tokens) == 0:
        return
    logit = torch.tensor([logits[token] for token in last.values()])[:, None]
    direction = torch.nn.functional.normalize(hidden[tokens])
    usual_hidden = hidden.shape[1] ** 0.5
    usual_weight = 1.5
    stretch = (logit.abs() / (usual_hidden * usual_weight)).sqrt()
    hidden[tokens] = direction * usual_hidden * stretch
    weight[labels[tokens]] = direction * usual_weight * stretch * logit.sign()


_LIKELY_TILES = {0: (0, 1, 2, 3), 1: (0, 2, 4)}
"""Of each shard, those with a row that some tokens of a block make likely; other blocks none."""


def _make_tiles(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, shards: list[tuple[int, int]],
    generator: torch.Generator,
) -> None:  # fmt: skip
    """Change inputs so that few rows are likely, in few tiles, and all others far from it.

    Every other token of the first two blocks has one likely row, in most cases its label. Feature 0
    is 1 in hidden, and makes a tile's last row four times as likely as its first. Feature 2 gives
    hidden a large mean, without which dweight would hardly show the rank-one term. Every 16th token
    has its label where no row is likely, and so have others with the same label: the first row of
    tile 4, which is likely for one block alone, or the shard's last row. One token's label lies far
    below all other rows, by feature 1.
    """
    T = len(hidden)
    weight /= 3.0
    bias *= 0.3
    hidden[:, :3] = torch.tensor([1.0, 0.0, 6.0])
    for start, end in shards:
        weight[start:end, 0] = torch.arange(end - start) % 256 / 180.0 - 0.7
    weight[:, 1:3] = 0.0
    owners = torch.randint(len(shards), (T,), generator=generator).tolist()
    draws = torch.randint(12, (T,), generator=generator).tolist()
    logit = math.log(len(weight))  # so that the row is as likely as about all others together
    for t, (owner, draw) in enumerate(zip(owners, draws, strict=True)):
        start, end = shards[owner]
        tiles = _LIKELY_TILES.get(t // 128)
        labels[t] = start + t % 250
        if t % 16 == 5:
            labels[t] = (start + 4 * 256, end - 1)[draw % 2]
        elif t % 2 == 0 and tiles:
            row = start + 256 * tiles[draw % len(tiles)] + 128
            direction = weight[row].clone()
            direction[0] = 0.0
            missing = logit - hidden[t] @ direction
            hidden[t] += direction * missing / (direction @ direction)
            if draw < 9:
                labels[t] = row
    t = T // 2 + 1
    row = shards[-1][0] + 255
    labels[t] = row
    hidden[t, 1] = 16.0
    weight[row, 1] = -4.0
