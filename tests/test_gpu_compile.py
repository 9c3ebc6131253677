"""torch.compile of a small model around the op, and PyTorch's examiner of operators, on a GPU.

"aot_eager" makes the same graphs as "inductor", in a tenth of the time; so inductor compiles one
schedule, on a GPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from flce_dist import linear_cross_entropy
from flce_dist.testing import error_budget, relative_rms
from tests.problems import METRICS
from tests.test_gpu_oracle import each_device

V, H = 1000, 64


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """Embedding, a layer, and the op over the embedding's own weight."""

    def __init__(self, device: str, dtype: torch.dtype, **options: Any) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(V, H, generator=g).to(device, dtype))
        self.mix = nn.Parameter((torch.randn(H, H, generator=g) / H**0.5).to(device, dtype))
        self.options = options

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = nn.functional.embedding(tokens, self.weight)
        hidden = nn.functional.silu(hidden @ self.mix)
        loss = linear_cross_entropy(hidden, self.weight, labels, **self.options)
        return 2.0 * loss.mean()


def batch(T: int, device: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(T)
    tokens = torch.randint(V, (2, T + 1), generator=g).to(device)
    labels = tokens[:, 1:].clone()
    labels[0, 1] = -100
    return tokens[:, :-1], labels


def results(call: Any, model: Model, T: int, device: str) -> dict[str, Tensor]:
    loss = call(*batch(T, device))
    names = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(names.values()))
    return {"loss": loss.detach(), **dict(zip(names, gradients, strict=True))}


def compare(
    compiled: dict[str, Tensor], plain: dict[str, Tensor], truth: dict[str, Tensor]
) -> None:
    """Compiled code may be off from fp64 by what uncompiled code grants it."""
    for name, result in compiled.items():
        budget = error_budget(result, truth[name], plain[name], dtype=torch.bfloat16)
        assert budget.met, f"{name}: {budget}"


@each_device
@pytest.mark.parametrize(
    "options",
    [{"schedule": "recompute", "reduction": "none"}, {"schedule": "cached"},
     {"schedule": "in_forward"}],
    ids=["recompute", "cached", "in_forward"],
)  # fmt: skip
def test_one_graph_for_any_number_of_tokens(options, device):
    """A first compilation, and at most one more for every other number of tokens."""
    model = Model(device, torch.bfloat16, **options)
    exact = Model(device, torch.float64, impl="eager", **options)
    exact.load_state_dict(model.state_dict())
    by_inductor = device == "cuda" and options["schedule"] == "cached"
    counter = CompileCounterWithBackend("inductor" if by_inductor else "aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for T in (48, 65, 100, 33, 77):
        plain = results(model, model, T, device)
        truth = results(exact, exact, T, device)
        compare(results(compiled, model, T, device), plain, truth)
        with pytest.raises(AssertionError, match="exceeds budget"):
            compare({**plain, "weight": plain["weight"] * 0.9}, plain, truth)
    assert counter.frame_count <= 2


@each_device
def test_a_value_read_on_the_host_is_not_compiled_whole(device):
    """Proof that fullgraph=True is strict: a value read on the host breaks the graph."""

    def reads(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss = linear_cross_entropy(hidden, weight, labels)
        return loss * 2 if float(loss) > 1e9 else loss

    model = Model(device, torch.float32)
    hidden, labels = torch.randn(9, H, device=device), torch.arange(9, device=device)
    compiled = torch.compile(reads, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"(?i)unsupported|data.dependent|item"):
        compiled(hidden, model.weight, labels)


@each_device
@pytest.mark.parametrize(
    ("schedule", "reduction", "with_metrics", "dtype"),
    [
        ("recompute", "mean", True, torch.bfloat16),
        ("cached", "none", False, torch.bfloat16),
        ("cached", "mean", True, torch.float16),
        ("in_forward", "sum", False, torch.float32),
        ("filtered", "mean", False, torch.bfloat16),
    ],
)
def test_opcheck(schedule, reduction, with_metrics, dtype, device):
    """Schema, fake, autograd registration and dynamic shapes, by PyTorch's own examiner."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 33, H, generator=g).to(device, dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g).to(device, dtype).requires_grad_()
    bias = torch.randn(V, generator=g).to(device, dtype).requires_grad_()
    labels = torch.randint(V, (2, 33), generator=g).to(device)
    how = {"filter_eps": 2.0**-12} if schedule == "filtered" else {"schedule": schedule}
    values = {
        "schedule": "auto",
        "hidden": hidden,
        "weight": weight,
        "labels": labels,
        "bias": bias,
        "reduction": reduction,
        "ignore_index": -100,
        "label_smoothing": 0.1,
        "z_loss_weight": 0.01,
        "logit_scale": 0.5,
        "sequence_parallel": False,
        "sequence_dim": 0,
        "reduce_dhidden": True,
        "reduce_in_fp32": False,
        "tp_invariant": False,
        "with_metrics": with_metrics,
        "needs": [True] * 3,
        **how,
    }
    # By name, with None for what is not given.
    operator = torch.ops.flce_dist.forward.default
    names = [argument.name for argument in operator._schema.arguments]
    assert values.keys() <= set(names)
    arguments = tuple(values.get(name) for name in names)
    opcheck(operator, arguments)

    call = linear_cross_entropy
    direct = call(
        hidden, weight, labels, bias=bias, reduction=reduction, label_smoothing=0.1,
        z_loss_weight=0.01, logit_scale=0.5, **how,
    )  # fmt: skip
    outputs = operator(*arguments)
    assert torch.equal(outputs[0], direct)
    assert with_metrics == (outputs[len(METRICS)].numel() == labels.numel())
    assert relative_rms(outputs[0] * 1.001, direct) > 5e-4
