"""``NO_LOGITS``: no tensor, passed by whatever handles outputs; every use is an error."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from flce_dist.hf.stand_in import NO_LOGITS

USES: dict[str, Callable[[Any], Any]] = {
    "method": lambda x: x.argmax(-1),
    "shape": lambda x: x.shape,
    "torch function": lambda x: torch.argmax(x, -1),
    "cross entropy": lambda x: torch.nn.functional.cross_entropy(x, torch.zeros(1).long()),
    "product": lambda x: x * 2,
    "product from the left": lambda x: torch.ones(1) * x,
    "index": lambda x: x[:, -1],
    "assignment": lambda x: x.__setitem__(0, 1.0),
    "comparison": lambda x: x == torch.ones(1),
    "iteration": list,
    "length": len,
    "truth": bool,
    "number": float,
    "array": lambda x: __import__("numpy").asarray(x),
    "new attribute": lambda x: setattr(x, "mark", 1),
}


@pytest.mark.parametrize("name", [name for name in USES if name != "new attribute"])
def test_each_use_says_how_to_get_logits(name):
    with pytest.raises((AttributeError, TypeError), match=r"pass logits=True"):
        USES[name](NO_LOGITS)


def test_it_is_no_tensor_and_keeps_nothing():
    assert not isinstance(NO_LOGITS, torch.Tensor)
    assert not hasattr(NO_LOGITS, "__torch_function__")
    assert not hasattr(NO_LOGITS, "shape") and not hasattr(NO_LOGITS, "detach")
    with pytest.raises(AttributeError):
        USES["new attribute"](NO_LOGITS)


def test_it_stays_itself():
    assert copy.copy(NO_LOGITS) is copy.deepcopy(NO_LOGITS) is NO_LOGITS
    assert pickle.loads(pickle.dumps(NO_LOGITS)) is NO_LOGITS
    output = {"loss": torch.ones(1), "logits": NO_LOGITS}
    moved = pytree.tree_map_only(torch.Tensor, lambda x: x.double(), output)
    assert moved["logits"] is NO_LOGITS and moved["loss"].dtype == torch.float64
    assert repr(NO_LOGITS) == "NO_LOGITS"
