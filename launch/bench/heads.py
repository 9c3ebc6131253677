"""Heads that benchmarks put into a trained model: exact, filtered and dropped gradients.

A head is a way in which an output layer of the plug-in computes its loss and gradients.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flce_dist.launch.dropped_tiles import drop_tiles

Head = Callable[[Any], None]
"""Sets ``token_loss`` of an output layer of the plug-in."""


def ours(**options: Any) -> Head:
    """linear_cross_entropy, with the run's options changed by these; metrics if it filters."""

    def switch(layer: Any) -> None:
        token_loss = functools.partial(type(layer).token_loss, layer, reduction="none", **options)
        layer.token_loss = token_loss
        layer.keeps_metrics = options.get("filter_eps") is not None

    return switch


CACHED = ours(schedule="cached", filter_eps=None)
RECOMPUTED = ours(schedule="recompute", filter_eps=None)
APPROXIMATE: dict[str, Head] = {
    "filtered, 2^-12": ours(schedule="auto", filter_eps=2.0**-12),
    "filtered, 2^-10": ours(schedule="auto", filter_eps=2.0**-10),
    "dropped, 2^-12": functools.partial(drop_tiles, eps=2.0**-12),
}


@contextmanager
def switched(layer: Any, head: Head) -> Iterator[None]:
    """Let an output layer compute its loss by ``head``, without other metrics; then as before."""
    attributes, names = vars(layer), ("token_loss", "keeps_metrics", "last_metrics")
    before = {name: attributes.pop(name) for name in names if name in attributes}
    head(layer)
    try:
        yield
    finally:
        for name in names:
            attributes.pop(name, None)
        attributes.update(before)
