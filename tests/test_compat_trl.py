"""flce_dist.compat.trl: what TRL's function returns, with TRL and without it.

Sizes and tolerances are those of TRL's own tests of the function.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from flce_dist.compat import trl as compat
from flce_dist.testing import error_budget

N, H, V, CHUNK = 64, 32, 128, 32
apply: Any = compat.ChunkedLogProbFunction.apply


def operands(*dtypes: torch.dtype) -> list[Tensor]:
    """hidden [N, H], weight [V, H] and bias [V] in these dtypes, by default fp32."""
    g = torch.Generator().manual_seed(42)
    drawn = [torch.randn(shape, generator=g) for shape in ((N, H), (V, H), (V,))]
    pairs = zip(drawn, dtypes or [torch.float32] * 3, strict=True)
    return [x.to(dtype).requires_grad_() for x, dtype in pairs]


TARGETS = torch.randint(V, (N,), generator=torch.Generator().manual_seed(7))


def textbook(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Any = 1.0, *,
    softcap: float | None = None, scale: float = 1.0, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What TRL documents, with logits in ``dtype``."""
    z = hidden.to(dtype) @ weight.to(dtype).T
    z = z if bias is None else z + bias.to(dtype)
    z = scale * z.to(torch.promote_types(dtype, torch.float32))
    z = z if softcap is None else softcap * (z / softcap).tanh()
    z = z / torch.as_tensor(temperature, dtype=z.dtype).reshape(-1, 1)
    logp = z.log_softmax(-1)
    logprobs = logp.gather(-1, TARGETS[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    return logprobs, entropy, (2 * logp).logsumexp(-1), z.mean(-1), z.argmax(-1) == TARGETS


def close(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found.to(expected), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.4, 2, N)], ids=str)
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, None), (1.0, 30.0), (0.5, 3.0)])
@pytest.mark.parametrize("biased", [False, True])
def test_results_and_gradients(temperature, scale, softcap, biased):
    """One of each result, and both differentiable ones together, as in PPO with a bonus."""
    leaves: list[Any] = operands()
    others: list[Any] = operands()
    if not biased:
        leaves[2] = others[2] = None
    found = apply(*leaves, TARGETS, temperature, CHUNK, softcap, scale)
    hidden, weight, bias = others
    expected = textbook(hidden, weight, bias, temperature, softcap=softcap, scale=scale)
    for name, ours, theirs in zip(("logprobs", *compat.OUTPUTS), found, expected, strict=True):
        assert ours is not None and ours.shape == (N,), name
        close(ours, theirs, 1e-5)
    (2.0 * found[0] + 0.5 * found[1]).sum().backward()
    (2.0 * expected[0] + 0.5 * expected[1]).sum().backward()
    for ours, theirs in zip(leaves, others, strict=True):
        if ours is not None:
            close(ours.grad, theirs.grad, 1e-4)
    assert not any(x.requires_grad for x in found[2:])


def test_a_target_that_is_banned():
    """Its log-probability is -inf; the sum of squares is that of the other ids."""
    hidden, weight, bias = (x.detach() for x in operands())
    bias[TARGETS[3]] = -torch.inf
    names = ("logprobs", *compat.OUTPUTS)
    found = dict(zip(names, apply(hidden, weight, bias, TARGETS, 0.7), strict=True))
    expected = dict(zip(names, textbook(hidden, weight, bias, 0.7), strict=True))
    assert found["logprobs"][3] == -torch.inf
    close(found["log_sum_sq_probs"], expected["log_sum_sq_probs"], 1e-5)


def test_only_what_is_asked_for():
    given = operands()
    for name in compat.OUTPUTS:
        values = apply(*given, TARGETS, 0.7, outputs=(name,))[1:]
        found = dict(zip(compat.OUTPUTS, values, strict=True))
        assert [key for key, x in found.items() if x is not None] == [name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "needs", [x for x in itertools.product([0, 1], repeat=3) if any(x)], ids=str
)
def test_half_precision_and_frozen_operands(dtype, needs):
    """hidden in bf16 beside parameters in fp32, too; TRL casts these to bf16."""
    results = []
    calls: list[Any] = [apply, textbook, partial(textbook, dtype=torch.bfloat16)]
    for call in calls:
        leaves = operands(torch.bfloat16, dtype, dtype)
        for x, need in zip(leaves, needs, strict=True):
            x.requires_grad_(bool(need))
        rounded = [x.bfloat16() for x in leaves]
        out = call(*leaves, TARGETS, 0.7) if call is apply else call(*rounded, 0.7)
        out[0].sum().backward()
        results.append([x.grad for x in leaves])
        assert [x.grad is not None for x in leaves] == [*map(bool, needs)]
        assert all(x.grad is None or x.grad.dtype == x.dtype for x in leaves)
    for ours, truth, eager in zip(*results, strict=True):
        if ours is not None and truth is not None and eager is not None:
            budget = error_budget(ours, truth, eager, dtype=torch.bfloat16)
            assert budget.met, budget


def test_autocast():
    """Bits that autocast discards reach neither results nor gradients."""
    hidden, weight, bias = operands()
    hidden = hidden.detach().bfloat16().float().requires_grad_()
    near = (hidden.detach() + hidden.detach().abs() * 1e-5).requires_grad_()
    assert torch.equal(hidden.bfloat16(), near.bfloat16())
    results = []
    for x in (hidden, near):
        with torch.autocast("cpu", torch.bfloat16):
            logprobs = apply(x, weight, bias, TARGETS, 1.0)[0]
        results.append((logprobs, *torch.autograd.grad(logprobs.sum(), (weight, bias))))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


SKIP = "TRL is not installed: `make rl` installs it and runs these tests"


@pytest.fixture
def utils() -> Iterator[Any]:
    """trl.trainer.utils, which gets TRL's own function back afterwards."""
    pytest.importorskip("trl", reason=SKIP)
    from trl.trainer import utils

    yield utils
    compat.restore()


def test_results_of_trls_function(utils):
    theirs = utils._ChunkedLogProbFunction
    compat.use_linear_cross_entropy()
    assert utils._ChunkedLogProbFunction is compat.ChunkedLogProbFunction
    given: Any = (*(x.detach() for x in operands()), TARGETS, 0.7, CHUNK, 4.0, 0.5)
    for ours, other in zip(apply(*given), theirs.apply(*given), strict=True):
        close(ours, other, 1e-5)


def test_a_release_without_the_function_says_so(utils, monkeypatch):
    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    with pytest.raises(NotImplementedError, match=r"TRL 1\.16.s fused LM head is not in TRL"):
        compat.use_linear_cross_entropy()


def test_trl_gets_its_own_back(utils):
    theirs = utils._ChunkedLogProbFunction, utils.DTensor
    compat.restore()
    for _ in range(2):  # as two trainers may call it
        compat.use_linear_cross_entropy()
    compat.restore()
    assert (utils._ChunkedLogProbFunction, utils.DTensor) == theirs


def only_parameters_are_none(group: dist.ProcessGroup) -> list[bool]:
    mesh = init_device_mesh("cpu", (group.size(),))
    whole = DTensor.from_local(torch.ones(2), mesh)
    seen = compat.DTensorButNoParameter
    assert seen.from_local(torch.ones(2), mesh).placements == whole.placements
    return [isinstance(x, seen) for x in (whole, torch.nn.Parameter(whole), torch.ones(2))]


def test_what_trl_takes_for_a_dtensor(pools):
    """All but a parameter, and the class answers as DTensor does."""
    assert pools[2].run(only_parameters_are_none) == [[True, False, False]] * 2
