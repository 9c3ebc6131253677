"""Causal attention by PyTorch's kernels for megatron-core's layer specs, context-parallel too.

s tokens of this rank, b batch, n heads of this rank, d their size, C context-parallel size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right


class CausalAttention(nn.Module):
    """Core attention that makes no [s, s] mask; it takes the place of ``DotProductAttention``.

    With context parallelism each rank gathers the keys and values of the whole sequence over the
    context group (one all-gather each; one reduce-scatter each in backward). Ranks hold tokens in
    Megatron's zigzag order: of 2 C parts of the sequence the r-th from the start and from the end.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        from megatron.core import parallel_state

        self.group = parallel_state.get_context_parallel_group()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return [s, b, n * d] for query, key and value [s, b, n, d]."""
        if self.group.size() == 1:
            return self._attend(query, key, value, is_causal=True)
        key, value = self._whole(key), self._whole(value)
        part = query.shape[0] // 2
        last = 2 * self.group.size() - 1
        attended = []
        for mine, place in zip(
            query.split(part), (self.group.rank(), last - self.group.rank()), strict=True
        ):
            keys = (place + 1) * part  # up to the end of this part
            bias = causal_lower_right(part, keys)
            attended.append(self._attend(mine, key[:keys], value[:keys], attn_mask=bias))
        return torch.cat(attended)

    def _whole(self, x: Tensor) -> Tensor:
        """Gather [s, b, n, d] over the context group, [C * s, b, n, d] in the sequence's order."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        parts = gather_from_sequence_parallel_region(x, group=self.group).chunk(
            2 * self.group.size()
        )
        return torch.cat([*parts[0::2], *reversed(parts[1::2])])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale, **mask)
        return out.permute(2, 0, 1, 3).flatten(2)


def zigzag(x: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """Return the share of a context-parallel ``rank``: of ``2 * ranks`` parts of ``dim`` two.

    They are the ``rank``-th from the start and from the end, so that causal attention costs every
    rank the same.
    """
    parts = x.chunk(2 * ranks, dim)
    return x if ranks == 1 else torch.cat([parts[rank], parts[-1 - rank]], dim)
