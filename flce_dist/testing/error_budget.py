"""How much error a result may have: a small multiple of eager PyTorch's error on the same data.

A fixed tolerance is either loose enough to pass zeros or tight enough to fail on a harder shape.
Here the error of eager PyTorch in the dtype under test is measured as well, both against fp64.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ErrorBudget:
    """The ``error`` of a result and the ``budget`` that it must not exceed, both relative RMS."""

    error: float
    budget: float

    @property
    def met(self) -> bool:
        """Whether the error is within the budget; NaN never is."""
        return self.error <= self.budget

    def __str__(self) -> str:
        sign = "<=" if self.met else "exceeds"
        return f"error {self.error:.3g} {sign} budget {self.budget:.3g} (relative RMS)"


def relative_rms(actual: Tensor, reference: Tensor) -> float:
    """Return ``rms(actual - reference) / rms(reference)`` in fp64.

    It is 0 if both are exactly 0 or empty, inf if only the reference is 0, NaN if ``actual`` holds
    NaN or inf. Shapes must be equal: a broadcast would compare something else.
    """
    return _relative_rms(actual, reference, "actual")


def _relative_rms(actual: Tensor, reference: Tensor, name: str) -> float:
    """``relative_rms`` of the caller's argument of this name."""
    if actual.shape != reference.shape:
        expected = tuple(reference.shape)
        got = tuple(actual.shape)
        raise ValueError(f"{name} must have reference's shape {expected}, got {got}")
    for of, x in ((name, actual), ("reference", reference)):
        if x.is_complex():  # whose imaginary part ``double`` would drop
            raise ValueError(f"{of} must be real, got {x.dtype}: compare torch.view_as_real of it")
    reference = reference.detach().double()
    difference = _norm(actual.detach().double() - reference)
    if not math.isfinite(difference):
        return math.nan
    scale = _norm(reference)
    return difference / scale if scale else math.inf if difference else 0.0


def _norm(x: Tensor) -> float:
    """Return the square root of the sum of squares, of which none underflows or overflows."""
    largest = x.abs().max().item() if x.numel() else 0.0
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * (x / largest).norm().item()


def error_budget(
    actual: Tensor, reference: Tensor, eager: Tensor, *, dtype: torch.dtype | None = None
) -> ErrorBudget:
    """Compare ``actual`` with ``reference`` (fp64), given ``eager``'s result of the same op.

    The budget is ``2 * (error of eager + rounding)``. Rounding is eps of ``dtype`` (the one under
    test, eager's by default) for the result, plus 8 eps of fp32 (fp64 for fp64) for its
    intermediates, since a relative error of one eps in a logit near 8 changes the exponential by 8
    eps. An eps of the *largest* element instead would accept a gradient with a few large rows that
    is half wrong. Only zeros meet a reference of zeros; eager's NaN adds nothing to the budget.

    Example::

        exact = torch.logsumexp(logits.double(), -1)
        budget = error_budget(mine, exact, torch.logsumexp(logits, -1))
        assert budget.met, budget
    """
    eager_error = _relative_rms(eager, reference, "eager")
    dtype = eager.dtype if dtype is None else dtype
    computed_in = torch.promote_types(dtype, torch.float32)
    rounding = torch.finfo(dtype).eps + 8 * torch.finfo(computed_in).eps
    budget = 2 * (rounding + (eager_error if math.isfinite(eager_error) else 0.0))
    return ErrorBudget(relative_rms(actual, reference), budget)


def assert_within_budget(
    actual: Tensor,
    reference: Tensor,
    eager: Tensor,
    *,
    dtype: torch.dtype | None = None,
    name: str = "result",
) -> None:
    """Raise ``AssertionError`` with both numbers unless ``error_budget(...)`` is met."""
    budget = error_budget(actual, reference, eager, dtype=dtype)
    if not budget.met:
        raise AssertionError(f"{name}: {budget}")
