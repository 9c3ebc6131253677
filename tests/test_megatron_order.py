"""A model of megatron-core with a vocab_order is the model without one, up to its rows' order."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")  # before ranks are forked

from flce_dist.megatron import use_linear_cross_entropy
from flce_dist.parallel.collectives import gather_tokens
from tests.contract.compare import compare
from tests.contract.gradients import loss_and_gradients
from tests.contract.models import B, uneven
from tests.megatron_models import (
    EMBEDDING,
    VOCAB,
    H,
    S,
    batch,
    first_stage,
    inputs_of,
    megatron,
    order_of,
    plain_and_ordered,
    token_losses,
)
from tests.on_ranks import on_ranks

LAYOUTS = [(1, False, True), (2, False, False), (2, True, True), (4, True, False), (4, True, True)]


def by_token(model: Any, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters or gradients by name, the head's as of all ranks' tokens."""
    layer, head = model.output_layer, {"output_layer.weight", "output_layer.bias"}
    if model.share_embeddings_and_output_weights:
        head.add(EMBEDDING)

    def whole(x: Tensor) -> Tensor:
        rows, order = gather_tokens(x, layer.tp_group), layer.row_of_token
        return rows if order is None else torch.cat([rows[order], rows[len(order) :]])

    return {name: whole(x) if name in head else x for name, x in found.items()}


def check_alike(expected: Any, found: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "tp, sp, tied, how",
    [*((*layout, how) for layout in LAYOUTS for how in ("fused", "real logits")),
     (2, True, True, "two depths")],
)  # fmt: skip
@on_ranks("tp")
def test_loss_and_every_gradient_are_those_without_an_order(group, tp, sp, tied, how):
    given = plain_and_ordered(tp, sp, tied, mtp=2 if how == "two depths" else 0)
    if how == "real logits":  # and labels of the tokenizer: under a hook the loss is Megatron's
        for model in given:
            model.output_layer.register_forward_hook(lambda layer, args, out: (out[0] * 2, out[1]))
    expected, found = (by_token(model, loss_and_gradients(model)) for model in given)
    check_alike(expected["loss"], found["loss"])
    compare(found, expected, 1e-5)


@on_ranks(2)
def test_a_padded_vocabulary_and_an_ignored_token_id(group):
    """An ignored token id is not the token whose row has this number."""
    vocab = VOCAB - 1
    given = plain_and_ordered(2, True, True, vocab_size=vocab, ignore_index=17)
    named = [{n: p.detach() for n, p in model.named_parameters()} for model in given]
    check_alike(*map(by_token, given, named))
    tokens, labels = (ids.clamp(max=vocab - 1) for ids in batch())
    labels[0, :2] = torch.tensor([17, int(order_of(vocab).token_of_row[17])])
    expected, found = (token_losses(model, tokens, labels) for model in given)
    assert expected[0, 0] == 0 and expected[0, 1] > 0
    check_alike(expected, found)


# --- real logits


@pytest.mark.parametrize("tp, sp, tied", LAYOUTS)
@on_ranks("tp")
def test_real_logits_are_in_the_tokenizers_order(group, tp, sp, tied):
    given = plain_and_ordered(tp, sp, tied, softcap=5.0)
    for gather in (None, False, True):
        expected, found = (
            model(*inputs_of(batch()[0]), runtime_gather_output=gather) for model in given
        )
        assert expected.shape[-1] == (VOCAB if gather else VOCAB // tp)
        check_alike(expected, found)
    # A bias that the caller adds.
    hidden, results = torch.randn(S // (tp if sp else 1), B, H), []
    for model in given:
        model.output_layer.skip_bias_add = True
        weight = model.shared_embedding_or_output_weight() if tied else None
        results.append(model.output_layer(hidden, weight=weight))
    check_alike(*results)


@pytest.mark.parametrize("tp, sp", [(1, False), (2, True)])
@on_ranks("tp")
def test_the_largest_logit_is_a_tokens(group, tp, sp):
    """Metrics of multi-token prediction turn a place into an id by adding the rank's first row."""
    plain, model = plain_and_ordered(tp, sp, False)
    hidden = torch.randn(S // (tp if sp else 1), B, H)
    expected = plain.output_layer(hidden, runtime_gather_output=True)[0].argmax(-1)
    layer = model.output_layer
    layer.is_lazy = True
    lazy, _ = layer(hidden)
    value, place = lazy.max(dim=-1)
    values = gather_tokens(value[None], group)
    ids = gather_tokens((place + group.rank() * lazy.size(-1))[None], group)
    assert torch.equal(ids.gather(0, values.argmax(0)[None])[0], expected)
    gathered, _ = layer(hidden, runtime_gather_output=True)
    assert torch.equal(torch.argmax(gathered, dim=-1), expected)


# --- what else the rows meet


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_main_grad_has_the_same_rows(group, tied):
    found = []
    for model in plain_and_ordered(2, True, tied):
        model.output_layer.gradient_accumulation_fusion = True
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
        for step in range(2):
            uneven(token_losses(model, *batch(step))).backward()
        assert weight.grad_added_to_main_grad
        name = EMBEDDING if tied else "output_layer.weight"
        found.append(by_token(model, {name: weight.main_grad}))
    compare(found[1], found[0], 1e-5)


def traces(model: Any) -> Any:
    """What a plug-in could leave on a module: attributes, buffers and hooks."""
    return {
        name: {key: len(x) if isinstance(x, dict | set) else id(x) for key, x in vars(m).items()}
        for name, m in model.named_modules()
    }


@on_ranks(2)
def test_a_first_stage_with_a_tied_embedding(group):
    """A stage of a pipeline without an output layer; without an order it is left alone."""
    expected, stage = megatron(2, sp=False, tied=True), first_stage(2)
    before = traces(stage)
    assert use_linear_cross_entropy(stage) is stage and traces(stage) == before
    use_linear_cross_entropy([stage], vocab_order=order_of())
    assert traces(stage) != before
    tokens, positions, _ = inputs_of(batch()[0])
    words, theirs = (m.embedding.word_embeddings for m in (stage, expected))
    assert not torch.equal(words.weight, theirs.weight)
    assert torch.equal(stage.embedding(tokens, positions), expected.embedding(tokens, positions))
    assert torch.equal(words(input_=tokens), words(tokens))
    added = {"embedding.word_embeddings.row_of_token"}
    assert stage.state_dict().keys() - expected.state_dict().keys() == added


@on_ranks(2)
def test_wrong_orders_are_refused(group):
    short, of_rank = torch.arange(VOCAB - 1), order_of(seed=group.rank())
    wrong: list[tuple[Any, str]] = [
        (short, rf"each of vocab_size = {VOCAB} rows, got \({VOCAB - 1},\)"),
        (of_rank, r"order \w+ on rank 0 and order \w+ on rank 1"),
    ]
    for order, message in wrong:
        with pytest.raises(ValueError, match=f"^vocab_order must .*{message}"):
            use_linear_cross_entropy(megatron(2, True, False), vocab_order=order)
    model = megatron(2, True, False).to("meta")
    with pytest.raises(NotImplementedError, match="meta device; build it on the CPU"):
        use_linear_cross_entropy(model, vocab_order=order_of())
