"""PEFT before and after the plug-in: the loss stays fused and equal, whatever the head becomes."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft

from flce_dist.hf import use_linear_cross_entropy
from tests.contract.compare import compare
from tests.hf_models import VOCAB, batch, ours, real_logits, step, theirs

BUDGET = 1e-5  # fp32
TOKENS = [3, 5, 40]
LORA: dict[str, dict[str, Any]] = {
    "LoRA on the head": {"target_modules": ["q_proj", "lm_head"]},
    "LoRA below, a trained copy of the head": {
        "target_modules": ["q_proj"], "modules_to_save": ["lm_head"],
    },
    "LoRA below": {"target_modules": ["q_proj"]},
    "LoRA below, trained tokens": {
        "target_modules": ["q_proj"], "trainable_token_indices": TOKENS,
    },
}  # fmt: skip
FOR_TIED = "LoRA below, trained tokens"
ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "plug-in first": lambda model, config: peft.get_peft_model(ours(model), config),
    "adapter first": lambda model, config: use_linear_cross_entropy(
        peft.get_peft_model(copy.deepcopy(model), config)
    ),
}


def fill(model: Any) -> Any:
    """Give each trained parameter values that change the logits, the same for the same names."""
    generator = torch.Generator().manual_seed(3)
    for _, p in sorted(model.named_parameters()):
        if p.requires_grad:
            p.data = 0.3 * torch.randn(p.shape, generator=generator)
    return model.train()


def pair(name: str, order: str) -> tuple[Any, Any]:
    """A model with adapters, with the plug-in and without."""
    model = theirs("qwen3, tied" if name == FOR_TIED else "llama")
    config = peft.LoraConfig(r=4, **LORA[name])
    plugged = fill(ORDERS[order](model, config))
    return plugged, fill(peft.get_peft_model(model, copy.deepcopy(config)))


def equal_steps(plugged: Any, model: Any, vocab: int = VOCAB) -> None:
    """A step of both is equal, and none of ours makes logits; so is generation."""
    for one in (plugged, model):
        if not any(p.requires_grad for p in one.parameters()):
            one.requires_grad_(True)
    with real_logits(vocab) as made:
        found = step(plugged.train())
    assert made == []
    compare(found, step(model.train()), BUDGET)
    ids, given = batch()["input_ids"], {"max_new_tokens": 3, "do_sample": False}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = (x.eval().generate(input_ids=ids, **given) for x in (plugged, model))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", LORA)
def test_steps(name, order):
    equal_steps(*pair(name, order))


def test_lora_around_trained_tokens_of_a_tied_head():
    """Refused by its classes' names before the plug-in; after it the loss is of real logits."""
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], trainable_token_indices=TOKENS)
    try:
        model = peft.get_peft_model(theirs("qwen3, tied"), config)
    except TypeError as error:
        pytest.skip(f"PEFT refuses it with this transformers: {error}")
    with pytest.raises(
        NotImplementedError, match=r"got Linear of peft\.\S+ around TrainableTokensWrapper$"
    ):
        use_linear_cross_entropy(model)
    plugged = peft.get_peft_model(use_linear_cross_entropy(theirs("qwen3, tied")), config)
    with pytest.warns(UserWarning, match=r"from real logits: .* a Linear of peft\.tuners\.lora"):
        found = step(fill(plugged), may_warn=True)
    compare(found, step(fill(model)), BUDGET)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", LORA)
@pytest.mark.parametrize("way", ["merge_and_unload", "unload"])
def test_without_its_adapters_again(name, order, way):
    plugged, model = (getattr(one, way)() for one in pair(name, order))
    assert type(plugged.lm_head).__name__ == "Linear"
    equal_steps(plugged, model)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", LORA)
def test_disabled_adapters(name, order):
    plugged, model = pair(name, order)
    with plugged.disable_adapter(), model.disable_adapter(), real_logits() as made:
        loss = plugged(**batch()).loss
        assert made == []
        torch.testing.assert_close(loss, model(**batch()).loss)
    equal_steps(plugged, model)


@pytest.mark.parametrize("order", ORDERS)
def test_a_second_adapter_with_a_copy_of_its_own(order):
    plugged, model = pair("LoRA below, a trained copy of the head", order)
    config = peft.LoraConfig(r=2, **LORA["LoRA below, a trained copy of the head"])
    losses = []
    for one in (plugged, model):
        one.add_adapter("second", copy.deepcopy(config))
        one.set_adapter("second")
        fill(one)
    for name in ("second", "default", "second"):
        for one in (plugged, model):
            one.set_adapter(name)
        equal_steps(plugged, model)
        losses.append(float(plugged.train()(**batch()).loss.detach()))
    assert losses[0] == losses[2] != losses[1]
    for one in (plugged, model):
        one.delete_adapter("second")
        one.set_adapter("default")
    equal_steps(plugged, model)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["LoRA on the head", "LoRA below, a trained copy of the head"])
def test_an_adapter_of_each_row(name, order):
    """PEFT tells its layers by a hook which rows are whose: the loss is of real logits."""
    losses = []
    for one in pair(name, order):
        one.add_adapter("second", peft.LoraConfig(r=2, **LORA[name]))
        one.set_adapter("second")
        fill(one)
        one.set_adapter("default")
        of_rows = {"adapter_names": ["default", "second"]}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the loss is computed from real logits")
            losses.append(one.eval()(**batch(), **of_rows).loss)
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("kind", ["llama", "qwen3, tied"])
@pytest.mark.parametrize("size", [VOCAB + 6, VOCAB - 8])
def test_another_number_of_tokens(kind, size):
    model = theirs(kind)
    plugged = ours(model)
    for one in (plugged, model):
        one.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        for mine, its in zip(plugged.parameters(), model.parameters(), strict=True):
            nn.init.normal_(its, std=0.3)
            mine.copy_(its)
    given = {name: x.clamp(max=size - 1) for name, x in batch().items()}
    with real_logits(size) as made:
        found = step(plugged, **given)
    assert made == []
    compare(found, step(model, **given), BUDGET)


def test_another_layer_that_the_plug_in_does_not_know():
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(x)

    model = theirs()
    plugged = ours(model)
    for one in (plugged, model):
        head = Scaled(32, VOCAB, bias=False)
        head.weight = one.lm_head.weight
        one.set_output_embeddings(head)
    with pytest.warns(UserWarning, match="the output layer is a Scaled of "):
        found = step(plugged, may_warn=True)
    compare(found, step(model), BUDGET)


def test_a_weight_that_is_made_in_each_call():
    model = theirs()
    plugged = ours(model)
    for one in (plugged, model):
        prune.l1_unstructured(one.lm_head, "weight", 0.5)
    with pytest.warns(UserWarning, match="a Linear of torch.*, whose weight is a Tensor; they"):
        found = step(plugged, may_warn=True)
    compare(found, step(model), BUDGET)


def test_a_model_with_adapters_is_pickled():
    for name in LORA:
        plugged, model = pair(name, "plug-in first")
        equal_steps(pickle.loads(pickle.dumps(plugged)), model)
