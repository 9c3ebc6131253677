"""LoRA on the output layer is in the loss: columns behind the weight's own, or real logits."""

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft

from flce_dist.core import gradients
from flce_dist.hf import NO_LOGITS, use_linear_cross_entropy
from tests.contract.compare import compare
from tests.hf_models import VOCAB, batch, ours, real_logits, step, theirs
from tests.test_hf import BUDGET

BF16_BUDGET = 0.03


def with_lora(
    kind: str = "llama", adapters: int = 1, dtype: torch.dtype = torch.float32, **config: Any
) -> Any:
    """The model with adapters that change its logits, all of them active, in fp32."""
    config = {"r": 4, "target_modules": ["q_proj", "lm_head"], **config}
    model: Any = peft.get_peft_model(theirs(kind).to(dtype), peft.LoraConfig(**config))
    names = ["default"]
    for i in range(1, adapters):
        names.append(f"more{i}")
        model.add_adapter(names[-1], peft.LoraConfig(**{**config, "r": 3, "lora_alpha": 2}))
    model.base_model.set_adapter(names)
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = 0.3 * torch.randn(p.shape, generator=generator)
    return model.train()


@pytest.mark.parametrize("kind", ["llama", "gemma2, softcap", "phi, bias", "granite, quotient"])
@pytest.mark.parametrize(
    "config",
    [{}, {"adapters": 2, "use_rslora": True}, {"lora_bias": True}, {"target_modules": ["q_proj"]}],
    ids=str,
)
def test_a_step_equals_the_models_own(kind, config):
    model = with_lora(kind, **config)
    plugged = ours(model)
    assert plugged(**batch()).logits is NO_LOGITS
    compare(step(plugged), step(model), BUDGET)


@pytest.mark.parametrize("kind", ["llama", "phi, bias", "granite, quotient"])
def test_adapters_in_fp32_beside_a_weight_in_16_bits(kind):
    """PEFT makes them so; with lora_bias their bias is wider than the weight, too."""
    model = with_lora(kind, dtype=torch.bfloat16, lora_bias=True, target_modules=["lm_head"])
    plugged = ours(model)
    assert plugged(**batch()).logits is NO_LOGITS
    compare(step(plugged), step(model), BF16_BUDGET)
    out = plugged(**batch(), logits=True)
    expected = model(**batch())
    assert out.logits.dtype == torch.bfloat16
    compare({"logits": out.logits}, {"logits": expected.logits}, BF16_BUDGET)


@pytest.mark.parametrize("adapters", [1, 2])
def test_no_gradient_of_the_frozen_weight_is_computed(mutate, adapters):
    """The product with the hidden states is of as many columns as all adapters have."""
    widths: set[int] = set()

    def noting(product, *args, sums_tokens, out, **rest):
        if sums_tokens:
            widths.add(out.shape[1])
        product(*args, sums_tokens=sums_tokens, out=out, **rest)

    mutate(gradients.gemm, "product", noting)
    step(ours(with_lora(adapters=adapters, target_modules=["lm_head"])))
    assert widths == {4 if adapters == 1 else 7}


def test_dropout_before_the_adapter():
    model = with_lora(lora_dropout=0.5, target_modules=["lm_head"])
    plugged = ours(model)
    torch.manual_seed(0)
    found = step(plugged)
    torch.manual_seed(0)
    compare(found, step(model), BUDGET)
    assert step(model)["loss"] != found["loss"]


def test_one_mask_of_dropout_for_all_uses_of_the_logits():
    """Two losses, logits after them, and logits beside the loss: as of one call of the layer."""
    model = with_lora(lora_dropout=0.5, target_modules=["lm_head"])

    class Changed(type(model.get_base_model())):  # type: ignore[misc]
        def forward(self, input_ids, labels=None, **_):
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            twice = [self.loss_function(logits, labels, VOCAB) for _ in range(2)]
            loss = twice[0] + 2.0 * twice[1] + 0.1 * logits.exp().mean()
            return type("Out", (dict,), {"loss": loss})(loss=loss, logits=logits)

    model.get_base_model().__class__ = Changed
    plugged = ours(model)
    for given in ({}, {"logits": True}):
        torch.manual_seed(0)
        found = step(plugged, may_warn=True, **given)
        torch.manual_seed(0)
        compare(found, step(model), BUDGET)


def test_adapters_that_are_merged_or_disabled():
    model = with_lora()
    plugged = ours(model)
    trained = model(**batch()).loss.detach()
    with plugged.disable_adapter(), model.disable_adapter():
        found, expected = plugged(**batch()), model(**batch()).loss
        torch.testing.assert_close(found.loss, expected)
        assert found.logits is NO_LOGITS and expected != trained
    for one in (plugged, model):
        one.merge_adapter()
    torch.testing.assert_close(plugged(**batch()).loss, trained)
    with plugged.disable_adapter(), pytest.warns(UserWarning, match="merged LoRA is disabled"):
        torch.testing.assert_close(plugged(**batch()).loss, expected)


def test_variants_have_real_logits():
    model = with_lora(use_dora=True)
    plugged = ours(model)
    with pytest.warns(UserWarning, match="variant, such as DoRA"):
        compare(step(plugged, may_warn=True), step(model), BUDGET)


def test_a_copy_of_the_layer_that_is_trained():
    model = with_lora(target_modules=["q_proj"], modules_to_save=["lm_head"])
    plugged = ours(model)
    assert plugged(**batch()).logits is NO_LOGITS
    compare(step(plugged), step(model), BUDGET)
    with torch.no_grad():
        for one in (plugged, model):
            one.get_base_model().lm_head.original_module.weight.mul_(2.0)
    compare(step(plugged), step(model), BUDGET)
    with plugged.disable_adapter(), model.disable_adapter():
        torch.testing.assert_close(plugged(**batch()).loss, model(**batch()).loss)


def test_an_adapter_that_comes_later():
    model = theirs()
    config = peft.LoraConfig(r=4, target_modules=["lm_head"])
    plugged, expected = (peft.get_peft_model(x, config) for x in (ours(model), theirs()))
    for one in (plugged, expected):
        nn.init.constant_(one.lm_head.lora_B["default"].weight, 0.1)
    expected.load_state_dict(plugged.state_dict())
    with real_logits() as made:
        found = step(plugged)
    assert made == []
    compare(found, step(expected), BUDGET)
    for one in (plugged, expected):
        one.get_base_model().lm_head.base_layer.register_forward_hook(lambda *given: None)
    with pytest.warns(UserWarning, match="a hook of the output layer"):
        compare(step(plugged, may_warn=True), step(expected), BUDGET)


def test_other_adapters_are_refused():
    adapters = {
        "SVDLinear": peft.AdaLoraConfig(target_modules=["lm_head"], init_r=4, total_step=10),
        r"Linear of peft\.tuners\.vera\.layer": peft.VeraConfig(target_modules=["lm_head"], r=4),
    }
    for name, config in adapters.items():
        model = peft.get_peft_model(theirs(), config)
        with pytest.raises(NotImplementedError, match=f"LoRA on one, got {name} around Linear$"):
            use_linear_cross_entropy(model)
