"""Small problems, grids and decorators that test files share.  T tokens, V vocabulary rows."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flce_dist.op import plan
from flce_dist.options import Schedule
from tests.oracle import Inputs, Outcome, device_of, make_inputs

SCHEDULES: list[Schedule] = ["recompute", "cached", "in_forward"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Case = TypeVar("Case", bound=tuple[Any, ...])

both = pytest.mark.parametrize("impl", ["eager", "triton"])
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="counts tiles of the interpreter, or patches its kernels"
)

T, V, H = 40, 600, 24  # of ``inputs``; 10 tiles of 64 columns in the interpreter, the last of 24

Patch = Callable[[Any, str, Callable[..., Any]], None]
"""Of the fixture ``mutate`` in conftest.py."""


def pairwise(cases: Iterable[Case]) -> list[Case]:
    """Some of the cases, in which all values of any two parameters meet that meet in ``cases``."""
    left = list(cases)
    met = {case: set(itertools.combinations(enumerate(case), 2)) for case in left}
    missing = set().union(*met.values())
    chosen = []
    while missing:
        chosen.append(max(left, key=lambda case: len(met[case] & missing)))
        missing -= met[chosen[-1]]
    return chosen


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty yields NaN: whatever is read before it is written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def small(impl: str, **kwargs: Any) -> Inputs:
    """A problem of several ragged tiles that the interpreter computes quickly."""
    return make_inputs(37, 150, 32, bias=True, **kwargs).to(device_of(impl))


def inputs(dtype: torch.dtype = torch.float32) -> Inputs:
    """A problem in which planted mistakes must show."""
    return make_inputs(T, V, H, dtype, bias=True, token_weight=True)


def with_logits(z: Tensor, labels: Tensor, dtype: torch.dtype = torch.float32) -> Inputs:
    """Inputs whose logits are exactly ``z`` [T, V]: one-hot hidden states pick columns of weight.

    dweight is then dlogits, transposed.
    """
    return Inputs(torch.eye(len(z)).to(dtype), z.T.contiguous().to(dtype), labels)


def label_below(nats: float) -> Inputs:
    """Tokens whose label lies ``nats`` below another column; the rescue begins at 50."""
    z = torch.randn(8, 70, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8)
    z[F.one_hot((labels + 1) % 70, 70).bool()] = nats
    return with_logits(z, labels)


def every_other(x: Tensor, dim: int) -> Tensor:
    """``x`` again, as every other slice of a tensor twice as long."""
    return x.repeat_interleave(2, dim)[(slice(None),) * dim + (slice(None, None, 2),)]


def assert_same(one: Outcome, other: Outcome) -> None:
    """Bitwise."""
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def forget_plans() -> None:
    """Plans are remembered by their arguments; sizes that a test patches are not among those."""
    for function in vars(plan).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
