"""Lines of Megatron's contract for an output layer, on the installed megatron-core; the table."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")  # before ranks are forked

from flce_dist.testing import RankPool
from tests.contract.compare import LINES, Outcome, decide
from tests.contract.models import SETTINGS, Setting
from tests.contract.run_version import outcome
from tests.contract.table import PAGE, RESULTS, with_table

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def quick() -> list[tuple[Setting, str]]:
    """Each line under sequence parallelism, and some in the other settings of up to 2 ranks."""
    some = ("tied embeddings", "bf16 parameters", "fusion: bf16 parameters, fp32 main_grad")
    others = [(at, title) for at in (Setting(1, False), Setting(2, False)) for title in some]
    return [*((Setting(2, True), title) for title in LINES), *others]


@pytest.mark.parametrize("at, title", quick(), ids=str)
def test_a_line_of_the_contract(pools: dict[int, RankPool], at: Setting, title: str) -> None:
    one = outcome(pools[2 * at.tp], title, at)
    assert one.result in ("pass", "n/a"), one.reason


# --- mistakes show


@contextmanager
def patched(owner: Any, name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """In ranks that other tests use, too."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrong(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)


def dropped(opened: Any, self: Any, operand: Tensor) -> tuple[Tensor, bool]:
    main_grad, adds = opened(self, operand)
    return torch.zeros_like(main_grad), adds


def overwritten(opened: Any, self: Any, operand: Tensor) -> tuple[Tensor, bool]:
    return opened(self, operand)[0], False


def returned_too(closed: Any, self: Any, dweight: Tensor) -> Tensor | None:
    self.weight.grad_added_to_main_grad = False
    return dweight.clone()


def unflagged(closed: Any, self: Any, dweight: Tensor) -> Tensor | None:
    result = closed(self, dweight)
    self.weight.grad_added_to_main_grad = False
    return result


def shifted(token_loss: Any, self: Any, hidden: Tensor, weight: Tensor, *rest: Any, **kw: Any):
    """The vocabulary's rows are one off."""
    return token_loss(self, hidden, weight.roll(1, 0), *rest, **kw)


def smoothed(token_loss: Any, self: Any, *args: Any, **kwargs: Any):
    return token_loss(self, *args, label_smoothing=1e-3, **kwargs)


def always_lazy(answer: Any, self: Any, *args: Any) -> Any:
    self.is_lazy = args[-1] is None
    return answer(self, *args)


MISTAKES: dict[str, tuple[str, Callable[..., Any]]] = {
    "dropped": ("MainGrad.opened", dropped),
    "overwritten": ("MainGrad.opened", overwritten),
    "added twice": ("MainGrad.closed", returned_too),
    "not flagged": ("MainGrad.closed", unflagged),
    "shifted": ("FusedLayer.token_loss", shifted),
    "smoothed": ("FusedLayer.token_loss", smoothed),
    "always lazy": ("FusedLayer.answer", always_lazy),
}


def decide_mistaken(group: Any, mistake: str, title: str) -> Outcome:
    from flce_dist.megatron import fused_layer
    from flce_dist.op.main_grad import MainGrad

    place, wrong = MISTAKES[mistake]
    class_name, method = place.split(".")
    owner = MainGrad if class_name == "MainGrad" else getattr(fused_layer, class_name)
    with patched(owner, method, wrong):
        try:
            return decide(group, title, Setting(2, True))
        except AttributeError as no_logits:
            return Outcome("fail", reason=str(no_logits))


FIRST = "loss of each token, every gradient"
FUSED = "fusion: fp32 main_grad, three microbatches"
DUMMIES = "fusion: flag, dummy gradient, captured main_grad"


@pytest.mark.parametrize(
    "mistake, title, seen",
    [
        ("dropped", FUSED, "output_layer.weight"),
        ("overwritten", FUSED, "output_layer.weight"),
        ("overwritten", DUMMIES, "flagged"),
        ("added twice", FUSED, "output_layer.weight"),
        ("not flagged", FUSED, "grad_added_to_main_grad"),
        ("not flagged", DUMMIES, "flag"),
        ("shifted", FIRST, "loss"),
        ("shifted", "bf16 parameters", "loss"),
        ("smoothed", FIRST, "loss"),
        ("always lazy", "labels=None: real logits, of this rank or gathered", "no logits"),
    ],
)
def test_a_mistake_shows(pools: dict[int, RankPool], mistake: str, title: str, seen: str) -> None:
    found = pools[4].run(decide_mistaken, mistake, title)
    assert any(one.result == "fail" and seen in one.reason for one in found), found


# --- the table


def test_the_page_has_the_table_of_the_result_file() -> None:
    page = PAGE.read_text()
    assert page == with_table(page)


def test_every_line_holds_in_every_release() -> None:
    lines = json.loads(RESULTS.read_text())["lines"]
    assert lines.keys() == LINES.keys()
    for title, versions in lines.items():
        assert len(versions) == 6, title
        for version, found in versions.items():
            assert found.keys() == {str(at) for at in SETTINGS}, (title, version)
            for one in found.values():
                assert not isinstance(one, str) or one.startswith("n/a: "), (title, version, one)
