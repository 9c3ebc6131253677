"""How much error a result may have: a small multiple of what eager PyTorch makes of the same data.

A fixed tolerance is either loose enough to pass zeros or tight enough to fail on a harder shape.
Here the yardstick is measured beside: eager PyTorch in the dtype under test, both against fp64.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ErrorBudget:
    """``error`` of a result and the ``budget`` it may use, both relative RMS."""

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

    0 where both are exactly 0 or empty, inf where only the reference is 0, NaN where ``actual``
    holds NaN or inf. Shapes must be equal: a broadcast would compare something else.
    """
    if actual.shape != reference.shape:
        raise ValueError(
            f"actual must have reference's shape {tuple(reference.shape)}, got "
            f"{tuple(actual.shape)}"
        )
    reference = reference.detach().double()
    difference = (actual.detach().double() - reference).norm().item()
    if not math.isfinite(difference):
        return math.nan
    scale = reference.norm().item()
    if scale == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / scale


def error_budget(
    actual: Tensor, reference: Tensor, eager: Tensor, *, dtype: torch.dtype | None = None
) -> ErrorBudget:
    """Compare ``actual`` with ``reference`` (fp64), given ``eager``'s result of the same op.

    The budget is ``2 * (error of eager + rounding)``: rounding is eps of ``dtype`` (the one under
    test, eager's by default) for the result, and 8 eps of fp32 (fp64 for fp64) for what it is
    computed from, since a logit near 8 that is off by one eps moves its exponential by 8. An eps of
    the *largest* element would instead let a gradient with a few large rows be half wrong. A
    reference of zeros is met by zeros only, and an eager result with NaN grants nothing.
    """
    eager_error = relative_rms(eager, reference)
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
