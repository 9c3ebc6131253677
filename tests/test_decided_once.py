"""A call is decided once for the same facts: no call gets the decision of another.

Each case calls as usual a few times, then with one thing changed, and compares with
the changed call alone.
"""

import contextlib
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flce_dist import linear_cross_entropy
from flce_dist.arguments import decided_once, prepare
from flce_dist.arguments.decided_once import calls
from flce_dist.testing import RankPool

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
    calls.clear()
    decided_once._checked_once.cache_clear()
    impl = {"impl": changed["impl"]} if changed["impl"] in IMPLS else {}
    usual, *_ = (outcome(arguments(**impl)) for _ in range(3))
    after = outcome(changed, context)
    decided = list(calls.values())
    again = outcome(arguments(**impl))
    calls.clear()
    decided_once._checked_once.cache_clear()
    alone = outcome(changed, context)
    assert not calls or decided[-1] == list(calls.values())[-1]
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


def call_with(T: int, **options: Any) -> None:
    hidden = torch.ones(T, H, requires_grad=True)
    linear_cross_entropy(hidden, torch.ones(V, H), torch.zeros(T, dtype=torch.int64), **options)


def test_a_call_in_use_stays_known_among_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "most", 8)
    made: list[Any] = []
    decide = prepare.new_call

    def noting(arguments: Any, *args: Any, **keywords: Any) -> Any:
        made.append(arguments.labels.numel())
        return decide(arguments, *args, **keywords)

    monkeypatch.setattr(prepare, "new_call", noting)
    for n in range(1, 40):
        call_with(100)
        call_with(n)
    assert made.count(100) == 1 and len(made) == 40
    assert len(calls) == 8


def test_threads_do_not_pass_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "most", 8)
    start = threading.Barrier(4)

    def many(first: int) -> None:
        start.wait()
        for n in range(first, first + 30):
            call_with(n)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(many, (1, 101, 201, 301)))
    assert len(calls) == 8


def made_and_destroyed(group: dist.ProcessGroup) -> tuple[int, int]:
    """Threads of this process before, and after ten groups had a call each."""
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(10):
        new = dist.new_group([0, 1])
        call_with(6, tp_group=new, vocab_size=2 * V)
        dist.destroy_process_group(new)
        del new
    gc.collect()
    return threads, len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
def test_destroyed_groups_leave_no_threads(ranks: RankPool) -> None:
    for before, after in ranks.run(made_and_destroyed):
        assert after <= before + 3  # of autograd, or of the last group, which are ending
