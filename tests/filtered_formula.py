"""A problem to filter, and ``flce_dist.filtered.oracle`` for tests' own types.

T tokens, V vocabulary rows, H hidden size.
"""

from dataclasses import replace
from typing import Any

import torch

from flce_dist import filtered
from flce_dist.filtered import FilteredGradients
from flce_dist.testing import relative_rms
from tests.outcomes import Outcome
from tests.problems import IGNORE, Inputs, Upstream, run_op, run_reference

GRADIENTS = ("dhidden", "dweight", "dbias")


def zipf_inputs(
    T: int = 512, V: int = 5000, H: int = 32, dtype: torch.dtype = torch.float32, *,
    bias: bool = False, token_weight: bool = False, ignored: float = 0.1,
) -> Inputs:  # fmt: skip
    """A model that knows how frequent each row is, and a little more; labels are drawn from it.

    Rows lie in order of frequency, which the first feature of hidden carries.
    """
    g = torch.Generator().manual_seed(T + V + H)
    hidden = torch.randn(T, H, generator=g)
    weight = torch.randn(V, H, generator=g) / H**0.5
    hidden[:, 0] = 1.0
    weight[:, 0] = -1.5 * torch.arange(V).add(4.0).log()
    hidden = hidden.to(dtype)
    weight = weight.to(dtype)
    labels = torch.multinomial((hidden.float() @ weight.float().T).softmax(1), 1, generator=g)[:, 0]
    labels[torch.rand(T, generator=g) < ignored] = IGNORE
    of_rows = (0.3 * torch.randn(V, generator=g)).to(dtype) if bias else None
    of_tokens = torch.rand(T, generator=g) * 2 - 0.5 if token_weight else None
    return Inputs(hidden, weight, labels, of_rows, of_tokens)


def definition(
    inputs: Inputs, eps: float, upstream: Upstream | None = None, **options: Any
) -> FilteredGradients:
    """Call ``flce_dist.filtered.oracle``, which knows no budget."""
    dloss: Any = (upstream or Upstream()).loss
    options.pop("max_logits_bytes", None)
    return filtered.filtered_gradients(eps=eps, dloss=dloss, **vars(inputs), **options)


def filtered_gradients(
    inputs: Inputs, eps: float, upstream: Upstream | None = None, **options: Any
) -> Outcome:
    """The gradients of ``definition`` by name."""
    found = definition(inputs, eps, upstream, **options)
    return Outcome({name: x for name in GRADIENTS if (x := getattr(found, name)) is not None})


def check_filtered(
    problem: Inputs, eps: float, upstream: Upstream | None = None, largest: float = 8.0,
    **options: Any,
) -> Outcome:  # fmt: skip
    """Run the op and compare its gradients with the definition, its loss with the reference.

    ``largest`` is about the size of the largest logit, which fp32 rounds.
    """
    upstream = upstream or Upstream()
    impl = options.pop("impl", "eager")
    spoilt = problem.hidden.masked_fill((problem.labels == IGNORE)[:, None], torch.nan)
    given = replace(problem, hidden=spoilt)
    actual = run_op(given, upstream, impl=impl, schedule=filtered.schedule(eps), **options)
    dtypes = torch.float64, problem.dtype
    truth, rounded = (run_reference(problem.to(x), upstream, **options) for x in dtypes)
    assert relative_rms(actual["loss"], truth["loss"]) <= 1e-5
    wide = torch.promote_types(problem.dtype, torch.float32)
    rounding = torch.finfo(problem.dtype).eps + largest * torch.finfo(wide).eps
    for name, wanted in filtered_gradients(problem, eps, upstream, **options).items():
        budget = 2 * (rounding + relative_rms(rounded[name], truth[name]))
        error = relative_rms(actual[name], wanted)
        assert error <= budget, f"{name}: error {error:.3g} exceeds {budget:.3g}"
    return actual
