"""Valid arguments of linear_cross_entropy, for tests of what is refused."""

from typing import Any

import torch

T, V, H = 6, 11, 4


def arguments(**changes: Any) -> dict[str, Any]:
    return {
        "hidden": torch.zeros(T, H, requires_grad=True),
        "weight": torch.zeros(V, H, requires_grad=True),
        "labels": torch.zeros(T, dtype=torch.int64),
        **changes,
    }
