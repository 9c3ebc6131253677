"""``flce_dist.compat.trl``: the divergence of TRL's distillation trainer, with TRL's arguments."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flce_dist.compat import trl as compat
from flce_dist.reference import reference_linear_divergence
from flce_dist.testing import relative_rms
from tests.on_ranks import on_ranks

N, V, H, H_T = 40, 130, 32, 48
KINDS = {0.0: "forward_kl", 1.0: "reverse_kl", 0.3: "jsd"}
apply: Any = compat.ChunkedDivergenceFunction.apply

each_beta = pytest.mark.parametrize("beta", KINDS)


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    shapes = (N, H), (V, H), (V,), (N, H_T), (V, H_T), (V,)
    drawn = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    return [x.requires_grad_(i < 3) for i, x in enumerate(drawn)]


@each_beta
@pytest.mark.parametrize(
    "more", [(), (0.7,), (1.3, 0.5, 4.0, 2.0, 6.0)], ids=["plain", "tempered", "scaled and capped"]
)
def test_results_and_gradients(beta: float, more: tuple[float, ...]) -> None:
    given = operands()
    found, entropy = apply(*given, beta, *more)
    hidden, weight, bias, *theirs = given
    usual: list[Any] = [1.0, 1.0, None, 1.0, None]
    usual[: len(more)] = more
    temperature, scale, softcap, their_scale, their_softcap = usual
    expected = reference_linear_divergence(
        hidden,
        weight,
        *theirs[:2],
        kind=KINDS[beta],
        beta=beta,
        reduction="none",
        bias=bias * scale,
        teacher_bias=theirs[2] * their_scale,
        temperature=temperature,
        logit_scale=scale,
        softcap=softcap,
        teacher_logit_scale=their_scale,
        teacher_softcap=their_softcap,
    )
    assert relative_rms(found, expected[0]) <= 1e-11
    assert relative_rms(entropy, expected[1]) <= 1e-11 and not entropy.requires_grad
    leaves = [hidden, weight, bias]
    gradients = torch.autograd.grad(found.sum(), leaves)
    for ours, other in zip(gradients, torch.autograd.grad(expected[0].sum(), leaves), strict=True):
        assert relative_rms(ours, other) <= 1e-10


@each_beta
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_a_scaled_bias_is_not_rounded(beta: float, softcap: float | None) -> None:
    given = [x.detach() for x in operands(torch.bfloat16)]
    found = apply(*given, beta, 0.7, 0.3, softcap, 0.3, softcap)
    expected = apply(*(x.double() for x in given), beta, 0.7, 0.3, softcap, 0.3, softcap)
    for ours, exact in zip(found, expected, strict=True):
        assert relative_rms(ours, exact) < 1e-5


@each_beta
def test_beside_trls_own(beta: float) -> None:
    theirs = pytest.importorskip("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    given = operands(torch.float32)
    for more in ((0.8,), (0.8, 0.5, 4.0, 2.0, 6.0)):
        ours, other = apply(*given, beta, *more), theirs.apply(*given, beta, *more)
        for x, y in zip(ours, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        of_ours, of_other = (torch.autograd.grad(x[0].sum(), given[:3]) for x in (ours, other))
        for x, y in zip(of_ours, of_other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


def test_trls_trainer_calls_it() -> None:
    trainer: Any = pytest.importorskip("trl.trainer.distillation_trainer")
    name = "ChunkedDivergenceFunction"
    theirs_before = getattr(trainer, name)
    hidden, weight, bias, *theirs = operands(torch.float32)
    mask = (torch.arange(N) % 3 > 0).view(4, -1)

    def loss() -> tuple[Tensor, ...]:
        return trainer._chunked_divergence_loss(
            hidden.view(4, -1, H),
            theirs[0].view(4, -1, H_T),
            weight,
            theirs[1],
            mask,
            0.5,
            student_lm_head_bias=bias,
            teacher_lm_head_bias=theirs[2],
            temperature=0.9,
        )

    expected = loss()
    compat.use_linear_divergence()
    assert getattr(trainer, name) is compat.ChunkedDivergenceFunction
    try:
        for ours, other in zip(loss(), expected, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)
    finally:
        compat.restore()
    assert getattr(trainer, name) is theirs_before


def log_probabilities(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    targets = torch.arange(N) % V
    return compat.ChunkedLogProbFunction.apply(hidden, weight, bias, targets, 0.9, None, None, 2.0)[
        0
    ]


def divergence(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    *_, teacher_hidden, teacher_weight, teacher_bias = operands(torch.float32)
    theirs = teacher_hidden, teacher_weight, teacher_bias
    return apply(hidden, weight, bias, *theirs, 0.3, 0.9, 2.0)[0]


@pytest.mark.parametrize("function", [log_probabilities, divergence])
@pytest.mark.parametrize("autocast", [False, True])
@on_ranks(2)
def test_weights_that_fsdp_has_sharded_in_another_dtype(group, function, autocast):
    """As whole ones, also outside forward of their module: ranks have the same tokens here."""
    hidden, weight, bias, *_ = operands(torch.float32)
    head = nn.Linear(H, V)
    for parameter, value in ((head.weight, weight), (head.bias, bias)):
        parameter.data.copy_(value)
    fully_shard(head)
    rounded = hidden.detach().bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = function(rounded, weight, bias)
        found = function(rounded, head.weight, head.bias)
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    for sharded, plain in ((head.weight, weight), (head.bias, bias)):
        assert isinstance(sharded.grad, DTensor) and plain.grad is not None
        assert relative_rms(sharded.grad.full_tensor(), plain.grad) < 1e-2
