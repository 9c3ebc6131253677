"""A call is decided once for the same facts: no call gets the decision, or the replay, of another.

Each case calls as usual until calls are replayed, then with one thing changed, and compares with
the changed call alone.
"""

import contextlib
from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy
from flce_dist.arguments import checks, prepare

T, H, V = 12, 16, 70
IMPLS = "eager", "triton"


def arguments(**changed: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    usual = {
        "hidden": torch.randn(T, H, requires_grad=True),
        "weight": torch.randn(V, H, requires_grad=True),
        "labels": torch.randint(0, V, (T,)),
        "bias": torch.randn(V, requires_grad=True),
        "token_weight": torch.rand(T),
        "impl": None,
    }
    return {**usual, **changed}


def outcome(given: dict[str, Any], context: Any = contextlib.nullcontext) -> list[Any]:
    """The loss and gradients of a call, or the error's text."""
    operands = [given[name] for name in ("hidden", "weight", "bias")]
    try:
        with context():
            loss = linear_cross_entropy(**given)
        wanted = [x for x in operands if isinstance(x, torch.Tensor) and x.requires_grad]
        if not loss.requires_grad:
            return [loss]
        return [loss.detach(), *torch.autograd.grad(loss.sum(), wanted)]
    except (ValueError, NotImplementedError) as error:
        return [str(error)]


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


def check_decides_anew(changed: dict[str, Any], context: Any = contextlib.nullcontext) -> None:
    prepare.calls.clear()
    checks._checked_once.cache_clear()
    impl = {"impl": changed["impl"]} if changed["impl"] in IMPLS else {}
    usual, *_ = (outcome(arguments(**impl)) for _ in range(3))
    after = outcome(changed, context)
    decided = list(prepare.calls.values())
    again = outcome(arguments(**impl))
    prepare.calls.clear()
    checks._checked_once.cache_clear()
    alone = outcome(changed, context)
    assert not prepare.calls or decided[-1] == list(prepare.calls.values())[-1]
    assert len(after) == len(alone) and all(map(same, after, alone))
    assert all(map(same, usual, again))
    assert isinstance(after[0], str) or len(after) != len(usual) or not all(map(same, after, usual))


FP64 = {
    name: x.detach().double().requires_grad_() if x.is_floating_point() else x
    for name, x in arguments().items()
    if name not in ("token_weight", "impl")
}
CHANGES: dict[str, dict[str, Any]] = {
    "dtype": FP64,
    "dtype of one": {"weight": FP64["weight"]},
    "shape": {"labels": torch.ones(T // 2, dtype=torch.int64), "hidden": torch.ones(T // 2, H),
              "token_weight": torch.ones(T // 2)},
    "rows": {"weight": torch.ones(V + 1, H), "bias": torch.ones(V + 1)},
    "shape of one": {"labels": torch.ones(T + 1, dtype=torch.int64)},
    "dtype of labels": {"labels": torch.ones(T)},
    "no bias": {"bias": None},
    "no weights": {"token_weight": None},
    "weights with a gradient": {"token_weight": torch.ones(T, requires_grad=True)},
    "no gradient of hidden": {"hidden": torch.ones(T, H)},
    "no gradient of weight": {"weight": torch.ones(V, H)},
    "no tensor": {"hidden": [[1.0] * H] * T},
    "layout": {"hidden": torch.ones(T, H).to_sparse().requires_grad_()},
    "device": {"hidden": torch.ones(T, H, device="meta", requires_grad=True)},
    "negated view": {"hidden": torch.randn(T, H, dtype=torch.complex64).conj().imag},
    "strides of hidden": {"hidden": torch.randn(H, T).T.requires_grad_()},
    "alignment": {"hidden": torch.randn(T * H + 1)[1:].view(T, H).requires_grad_()},
    "strides": {"weight": torch.randn(H, V).T.requires_grad_()},
    "a bool for a number": {"label_smoothing": False},
    "another type of group": {"tp_group": 0},
    **{f"{name}={value}": {name: value} for name, value in {
        "reduction": "sum", "ignore_index": 3, "label_smoothing": 0.5, "z_loss_weight": 0.5,
        "softcap": 1.0, "logit_scale": 2.0, "vocab_size": V - 1, "vocab_range": (0, V),
        "sequence_parallel": True, "sequence_dim": 2, "accumulate_dweight": True,
        "schedule": "other", "max_logits_bytes": 0, "impl": "other", "tp_invariant": True,
        "max_counted": 3,
    }.items()},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "impl"),
    [(name, impl) for name in CHANGES for impl in IMPLS if impl == "eager" or "=" not in name],
)
def test_changed_argument(name: str, impl: str) -> None:
    changed = arguments(**{"impl": impl, **CHANGES[name]})
    if name == "ignore_index=3":
        changed["labels"] = torch.full((T,), 3)
    check_decides_anew(changed)


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_changed_context(context: Any) -> None:
    check_decides_anew(arguments(), context)
