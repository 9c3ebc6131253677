"""What a call returned, by name, and how far each result may be from fp64."""

from typing import Any

import torch
from torch import Tensor

from flce_dist.testing import error_budget, relative_rms

Results = dict[str, Any]


class Outcome(dict[str, Any]):
    """Loss, metrics and gradients by name, also as attributes; ``calls`` names collectives."""

    @classmethod
    def of(cls, loss: Tensor, *gradients: Any, calls: Any = ()) -> "Outcome":
        names = ("dhidden", "dweight", "dbias")
        return cls(loss=loss.detach(), **dict(zip(names, gradients, strict=True)), calls=calls)

    def tensors(self) -> list[Tensor]:
        return [x for name, x in self.items() if name != "calls"]

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)

    def changed(self, **changes: Any) -> "Outcome":
        return Outcome(self, **changes)

    def without(self, *names: str) -> "Outcome":
        return Outcome({name: x for name, x in self.items() if name not in names})

    def part(self, tokens: Any, rows: slice) -> "Outcome":
        """Of gradients only these tokens and vocabulary rows; all else as it is."""
        kept = {"dhidden": tokens, "dweight": rows, "dbias": rows}
        return Outcome({name: x[kept[name]] if name in kept else x for name, x in self.items()})


def misses(
    actual: Results, truth: Results, eager: Results, dtype: torch.dtype, slack: float = 0.0
) -> list[str]:
    """Name what in ``actual`` is further from ``truth``, in fp64, than it may be, or missing.

    Both must have the same results; ``calls`` is none. A gradient may be off by what ``eager`` in
    ``dtype`` grants, and ``slack``; all else is fp32 whatever the operands are: eager's logits in
    half precision excuse nothing.
    """
    found = other_names(actual, truth)
    for name, result in actual.items():
        if name == "calls" or name not in truth:
            continue
        assert result.shape == truth[name].shape, f"{name}: {result.shape}, not {truth[name].shape}"
        result, expected = without_infinities(name, result, truth[name])
        error = relative_rms(result, expected)
        budget = 1e-5
        if name == "correct":
            budget = 0.0
        elif dtype == torch.float64:
            budget = 1e-11
        elif name == "entropy":
            error = (result.double() - expected).abs().amax().item() if result.numel() else 0.0
            budget += entropy_rounding(truth)
        elif name.startswith("d"):
            budget = error_budget(result, expected, eager[name], dtype=dtype).budget + slack
        else:
            assert result.dtype == torch.float32, f"{name}: {result.dtype}"
        if not error <= budget:
            found.append(f"{name}: error {error:.3g} exceeds budget {budget:.3g}")
    return found


def other_names(actual: Results, truth: Results) -> list[str]:
    """Name the results that one of them lacks, in order."""
    missing = sorted(truth.keys() - actual.keys() - {"calls"})
    unknown = sorted(actual.keys() - truth.keys() - {"calls"})
    return [f"{name}: missing" for name in missing] + [f"{name}: not asked for" for name in unknown]


def without_infinities(name: str, result: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Check that infinities are where they are expected; return both with 0 in their place."""
    infinite = expected.isinf()
    assert torch.equal(result[infinite].double(), expected[infinite].double()), f"{name}: not inf"
    return result.masked_fill(infinite, 0), expected.masked_fill(infinite, 0)


def entropy_rounding(truth: Results) -> float:
    """Absolute error that fp32 costs the entropy, for logits whose deviation is near 1 or above.

    It is ``(lse - z_label) - mean(z - z_label)``: where the label is unlikely both terms are large,
    and when they cancel their rounding stays. In its gradient it is added to ``z - lse``.
    """
    logprob = truth["logprob"].where(truth["logprob"].isfinite(), 0.0)
    largest = logprob.abs().amax().item() if logprob.numel() else 0.0
    return 8 * torch.finfo(torch.float32).eps * largest


def assert_same(one: Outcome, other: Outcome) -> None:
    """Check that two outcomes are bitwise equal."""
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
