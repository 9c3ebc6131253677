"""A line of the contract, and how it compares the plug-in with Megatron's own path."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
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


@dataclass(frozen=True)
class Decision:
    """``result`` is "pass", "fail" or "n/a"; ``error`` the largest of those compared."""

    result: str
    error: float = 0.0
    reason: str = ""


def decide(group: Any, title: str, at: Setting) -> Decision:
    """Decide one line on one rank."""
    try:
        return Decision("pass", LINES[title](at))
    except NotInThisVersion as missing:
        return Decision("n/a", reason=str(missing))
    except AssertionError as found:
        return Decision("fail", reason=str(found) or "assertion")


def against_megatron(
    build: Callable[[], Any],
    run: Callable[[Any], dict[str, Any]],
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> float:
    """Compare what ``run`` returns of a model with the plug-in and of the same one without."""
    ours = run(use_linear_cross_entropy(build(), **options))
    return compare(ours, run(build()), BUDGET[dtype])


def compared(
    title: str,
    run: Callable[[Any], dict[str, Any]],
    *models: dict[str, Any],
    change: Callable[[Any], object] = lambda model: None,
    dtype: torch.dtype = torch.float32,
    needs: str = "",
) -> None:
    """Add a line that compares what ``run`` returns of ``gpt`` with each of these options.

    ``change`` is made to each model. ``needs``: a field of TransformerConfig.
    """

    def build(at: Setting, options: dict[str, Any]) -> Any:
        model = gpt(at, **options)
        change(model)
        return model

    def decide(at: Setting) -> float:
        if needs:
            need_config(needs)
        return max(against_megatron(partial(build, at, x), run, dtype=dtype) for x in models)

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


def need_config(field: str) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    if field not in {known.name for known in fields(TransformerConfig)}:
        raise NotInThisVersion(f"TransformerConfig has no {field}")


def need_argument(function: Callable[..., Any], name: str) -> None:
    if name not in inspect.signature(function).parameters:
        raise NotInThisVersion(f"{function.__qualname__} has no {name}")


def need_attribute(owner: Any, name: str) -> None:
    if not hasattr(owner, name):
        raise NotInThisVersion(f"{owner.__name__} has no {name}")
