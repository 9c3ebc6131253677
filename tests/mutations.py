"""Small problems in which planted mistakes must show.

T tokens, V vocabulary rows, H hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.oracle import Inputs, make_inputs
from tests.problems import with_logits

T, V, H = 40, 600, 24

Patch = Callable[[Any, str, Callable[..., Any]], None]
"""Of the fixture ``mutate`` in conftest.py."""


def inputs(dtype: torch.dtype = torch.float32) -> Inputs:
    return make_inputs(T, V, H, dtype, bias=True, token_weight=True)


def label_below(nats: float) -> Inputs:
    """Tokens whose label lies ``nats`` below another column; the rescue begins at 50."""
    z = torch.randn(8, 70, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8)
    z[F.one_hot((labels + 1) % 70, 70).bool()] = nats
    return with_logits(z, labels)
