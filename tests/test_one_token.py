"""One token, hidden [H] without a dimension of tokens, in every function that takes [..., H]."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flce_dist

H, V = 8, 20
LABEL = torch.tensor(3)
IDS = torch.tensor([3, 7, 0])
TEACHER = torch.randn(V, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

CALLS: dict[str, Callable[[Tensor, Tensor, tuple[int, ...]], Any]] = {
    "linear_cross_entropy": lambda h, w, n: flce_dist.linear_cross_entropy(
        h, w, LABEL.expand(n), reduction="none"
    ),
    "linear_cross_entropy_with_metrics": lambda h, w, n: (
        flce_dist.linear_cross_entropy_with_metrics(h, w, LABEL.expand(n), reduction="none")
    ),
    "linear_logprob": lambda h, w, n: flce_dist.linear_logprob(h, w, IDS.expand(*n, 3)),
    "linear_top_k": lambda h, w, n: flce_dist.linear_top_k(h, w, 2, labels=LABEL.expand(n)),
    "linear_top_k, csr": lambda h, w, n: flce_dist.linear_top_k(h, w, 2, top_p=0.9).csr(),
    "linear_sample": lambda h, w, n: flce_dist.linear_sample(h, w, 5),
    "linear_divergence": lambda h, w, n: flce_dist.linear_divergence(
        h, w, h[..., :6], TEACHER, reduction="none"
    ),
    "linear_divergence_with_metrics": lambda h, w, n: flce_dist.linear_divergence_with_metrics(
        h, w, h[..., :6], TEACHER, reduction="none"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_token(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    hidden = torch.randn(H, generator=generator, dtype=torch.float64)
    of_one = CALLS[name](hidden, weight, ())
    of_row = CALLS[name](hidden[None], weight, (1,))
    if isinstance(of_one, Tensor):
        of_one, of_row = (of_one,), (of_row,)
    for one, row in zip(of_one, of_row, strict=True):
        if one is None:
            assert row is None
            continue
        expected = row if name.endswith("csr") else row[0]
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)
