"""A line of the contract, and how it compares the plug-in with Megatron's own path."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from flce_dist.megatron import use_linear_cross_entropy
from flce_dist.testing import relative_rms
from tests.contract.models import Setting, gpt

BUDGET = {torch.float32: 1e-5, torch.bfloat16: 0.03}
"""Relative RMS by the dtype of the parameters. bf16: Megatron rounds its logits."""

LINES: dict[str, Callable[[Setting], float]] = {}
"""Title of a line -> the function that decides it and returns the largest relative error."""


class NotInThisVersion(Exception):
    """This megatron-core has no such feature; the message names what is missing."""


def line(title: str) -> Callable[[Callable[[Setting], float]], Callable[[Setting], float]]:
    def add(decide: Callable[[Setting], float]) -> Callable[[Setting], float]:
        assert title not in LINES
        LINES[title] = decide
        return decide

    return add


def decide(group: Any, title: str, at: Setting) -> float | str:
    """Decide one line on one rank: the largest relative error, or "n/a: why"."""
    try:
        return LINES[title](at)
    except NotInThisVersion as missing:
        return f"n/a: {missing}"


def compared(
    title: str,
    run: Callable[[Any], dict[str, Any]],
    *options: dict[str, Any],
    model: Callable[..., Any] = gpt,
    change: Callable[[Any], object] = lambda model: None,
    dtype: torch.dtype = torch.float32,
    needs: str = "",
) -> None:
    """Add a line: ``run`` returns the same of a model with the plug-in and of one without.

    For each of the ``options`` of ``model``. ``change`` is made to each model first. ``needs``: a
    field of TransformerConfig.
    """

    def found(at: Setting, some: dict[str, Any], plugs: bool) -> dict[str, Any]:
        built = model(at, **some)
        change(built)
        return run(use_linear_cross_entropy(built) if plugs else built)

    def decide(at: Setting) -> float:
        if needs:
            from megatron.core.transformer.transformer_config import TransformerConfig

            need(needs, TransformerConfig.__dataclass_fields__, TransformerConfig)
        return max(compare(found(at, x, True), found(at, x, False), BUDGET[dtype]) for x in options)

    line(title)(decide)


def compare(ours: dict[str, Any], theirs: dict[str, Any], budget: float) -> float:
    """Return the largest relative error of the tensors; all else must be equal."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    worst = 0.0
    for name, expected in theirs.items():
        if not isinstance(expected, Tensor):
            assert ours[name] == expected, f"{name}: {ours[name]} for {expected}"
            continue
        assert isinstance(ours[name], Tensor), f"{name}: {ours[name]} for a tensor"
        assert ours[name].dtype == expected.dtype, f"{name}: {ours[name].dtype}"
        assert expected.any(), f"{name}: zeros compare nothing"
        error = relative_rms(ours[name], expected)
        assert error <= budget, f"{name}: relative error {error:.2g} exceeds {budget:.2g}"
        worst = max(worst, error)
    return worst


def need(name: str, known: Collection[str], owner: Any) -> None:
    """Raise if ``name`` is not among the fields, arguments or attributes of ``owner``."""
    if name not in known:
        raise NotInThisVersion(f"{owner.__qualname__} has no {name}")
