"""flce_dist.compat.verl: log-probabilities and entropy as verl's function returns them.

Only the last tests need verl, whose own function runs on GPUs alone.
"""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.compat import verl as compat
from flce_dist.testing import error_budget, run_ranks
from tests.parallel_problem import complaint
from tests.problems import DTYPES, per_token_upstream

B, S, H, V = 3, 7, 32, 60


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [B, S, H] and weight [V, H], uniform as in verl's tests; labels [B, S]."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.rand(*x, H, generator=g).sub(0.5).to(dtype) for x in ((B, S), (V,)))
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(V, (B, S), generator=g)


def textbook(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Any
) -> tuple[Tensor, Tensor]:
    z = hidden.flatten(0, -2) @ weight.T
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1, 1).to(z)
    logp = (z / temperature).log_softmax(-1)
    return logp.gather(-1, labels.reshape(-1, 1))[:, 0], -(logp.exp() * logp).sum(-1)


TEMPERATURES = [1.5, torch.linspace(0.3, 2.0, B * S).view(B, S)]
each_temperature = pytest.mark.parametrize("temperature", TEMPERATURES, ids=["1.5", "of each"])


@each_temperature
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients(temperature, dtype):
    """Upstream gradients of both results, in the dtype under test as in verl's tests."""
    given = operands(dtype)
    logprobs, entropy = compat.linear_cross_entropy(*given, temperature)
    upstream = tuple(per_token_upstream(B * S, seed=i).to(dtype) for i in range(2))
    found = torch.autograd.grad((logprobs, entropy), given[:2], upstream)
    results = []
    for wide in (torch.float64, dtype):
        hidden, weight = (x.detach().to(wide).requires_grad_() for x in given[:2])
        out = textbook(hidden, weight, given[2], temperature)
        gradients = torch.autograd.grad(out, (hidden, weight), [x.to(wide) for x in upstream])
        results.append((out, gradients))
    (expected, truth), (_, eager) = results
    for ours, other in zip((logprobs, entropy), expected, strict=True):
        assert ours.dtype == torch.float32 and ours.shape == (B * S,)
        torch.testing.assert_close(ours.double(), other, atol=2e-6, rtol=1e-5)
    for ours, other, rounded in zip(found, truth, eager, strict=True):
        budget = error_budget(ours, other, rounded, dtype=dtype)
        assert budget.met, budget


def test_ignored_labels_score_0():
    hidden, weight, labels = operands(torch.bfloat16)
    ignored = labels.clone()
    ignored[0, 1] = -100
    scores, all_scores = (compat.linear_cross_entropy(hidden, weight, x) for x in (ignored, labels))
    for ours, of_all in zip(scores, all_scores, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, of_all.index_fill(0, torch.tensor([1]), 0.0))


@each_temperature
def test_sequence_first(temperature):
    """Results are in labels' order, and gradients in hidden's."""
    hidden, weight, labels = operands()
    expected = compat.linear_cross_entropy(hidden, weight, labels, temperature)
    turned = hidden.detach().transpose(0, 1).contiguous().requires_grad_()
    found = compat.linear_cross_entropy(turned, weight, labels, temperature, sequence_first=True)
    g = per_token_upstream(B * S)
    of_turned = torch.autograd.grad(found, turned, (g, g))[0]
    assert all(map(torch.equal, found, expected))
    of_hidden = torch.autograd.grad(expected, hidden, (g, g))[0]
    assert torch.equal(of_turned.transpose(0, 1), of_hidden)


def test_labels_in_another_order_are_refused():
    hidden, weight, labels = operands()
    said = complaint(compat.linear_cross_entropy, hidden.transpose(0, 1), weight, labels)
    assert said.startswith("labels must be (7, 3) from hidden, or flat, got (3, 7)")
    one, *_ = compat.linear_cross_entropy(hidden[:1].transpose(0, 1), weight, labels[:1])
    flat, *_ = compat.linear_cross_entropy(hidden[0], weight, labels[:1].flatten())
    assert torch.equal(one, flat)


def test_tensors_are_checked_before_their_shapes_are_compared():
    given = dict(zip(("hidden", "weight", "labels"), operands(), strict=True))
    wrong: dict[str, Any] = {
        "hidden": given["hidden"].tolist(),
        "labels": given["labels"].tolist(),
        "temperature": torch.ones(B, S).to_sparse(),
    }
    for name, x in wrong.items():
        said = complaint(compat.linear_cross_entropy, **{**given, name: x})
        assert said.startswith(f"{name} must be a "), said
    flat = {**given, "hidden": torch.zeros(4), "sequence_first": True}
    said = complaint(compat.linear_cross_entropy, **flat)
    assert said == "hidden must be [S, B, H] with sequence_first=True, got (4,)"


def test_flags_and_groups_are_checked_by_their_names():
    for name, value in {"sequence_first": 1, "dist_process_group": "tp"}.items():
        given: dict[str, Any] = {name: value}
        said = complaint(compat.linear_cross_entropy, *operands(), **given)
        assert said.startswith(f"{name} must be "), said


@pytest.mark.usefixtures("ranks_compared")
def test_all_ranks_raise_what_one_refuses():
    hidden, weight, labels = operands()

    def rank(group: Any) -> str:
        own = labels[:, :-1] if group.rank() == 1 else labels
        options = {"dist_process_group": group}
        return complaint(compat.linear_cross_entropy, hidden, weight, own, **options)

    refused = "labels must be (3, 7) from hidden, or flat, got (3, 6)"
    assert all(refused in said for said in run_ranks(rank, 2))


def test_temperatures_in_another_order_are_refused():
    given = operands()
    of_each = torch.rand(B, S) + 0.5
    expected = compat.linear_cross_entropy(*given, of_each)
    assert all(map(torch.equal, compat.linear_cross_entropy(*given, of_each.flatten()), expected))
    for wrong, got in ((of_each.T, "(7, 3)"), (of_each[:, :1], "(3, 1)"), (of_each[0, 0], "()")):
        said = complaint(compat.linear_cross_entropy, *given, wrong)
        assert said == f"temperature must be a float, (3, 7) from labels, or flat, got {got}"


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions(reduction):
    given = operands()
    each, entropy = compat.linear_cross_entropy(*given, 0.8)
    total, same = compat.linear_cross_entropy(*given, 0.8, reduction)
    torch.testing.assert_close(total, getattr(each, reduction)())
    assert torch.equal(entropy, same)


@each_temperature
def test_the_caller_sums_dhidden_over_ranks(temperature):
    given = operands()
    upstream = per_token_upstream(B * S, seed=0), per_token_upstream(B * S, seed=1)
    out = textbook(*given, temperature)
    dhidden, dweight = torch.autograd.grad(out, given[:2], upstream)

    def rank(group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        hidden, weight, labels = operands()
        mine = weight.detach().chunk(2)[group.rank()].requires_grad_()
        out = compat.linear_cross_entropy(hidden, mine, labels, temperature, "none", group)
        return *(x.detach() for x in out), *torch.autograd.grad(out, (hidden, mine), upstream)

    ranks = run_ranks(rank, 2)
    for results in ranks:
        for ours, other in zip(results[:2], out, strict=True):
            torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ranks[0][2] + ranks[1][2], dhidden, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat([x[3] for x in ranks]), dweight, atol=1e-5, rtol=1e-4)


@pytest.fixture
def functional(monkeypatch: pytest.MonkeyPatch) -> Any:
    """verl.utils.experimental.torch_functional."""
    pytest.importorskip("verl", reason="verl is not installed: `make rl` installs it")
    from verl.utils.experimental import torch_functional

    return torch_functional


def test_results_of_verls_function_of_torch_operations(functional):
    hidden, weight, labels = operands()
    theirs = functional.FusedLinearForPPO()(hidden, weight, labels, 0.7)
    ours = compat.linear_cross_entropy(hidden, weight, labels, 0.7)
    upstream = per_token_upstream(B * S, seed=0), per_token_upstream(B * S, seed=1)
    gradients = []
    for out in (ours, tuple(x.flatten() for x in theirs)):
        gradients.append((*out, *torch.autograd.grad(out, (hidden, weight), upstream)))
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_verl_calls_ours(functional, monkeypatch):
    from verl.utils.kernel import linear_cross_entropy as module

    user: Any = type(sys)("verl.models.a_user")
    user.linear_cross_entropy = module.linear_cross_entropy
    monkeypatch.setitem(sys.modules, user.__name__, user)
    monkeypatch.setattr(module, "linear_cross_entropy", module.linear_cross_entropy)
    theirs = module.linear_cross_entropy
    for _ in range(2):
        compat.use_linear_cross_entropy()
        assert module.linear_cross_entropy is compat.linear_cross_entropy
        assert user.linear_cross_entropy is compat.linear_cross_entropy
    compat.restore()
    assert module.linear_cross_entropy is user.linear_cross_entropy is theirs
    assert compat.linear_cross_entropy is not theirs
