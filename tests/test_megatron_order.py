"""A model of megatron-core with a vocab_order is the model without one, up to its rows' order."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")  # before ranks are forked

from flce_dist.megatron import use_linear_cross_entropy
from flce_dist.parallel.collectives import gather_tokens
from flce_dist.testing import RankPool, relative_rms
from tests.contract.models import uneven
from tests.megatron_models import (
    VOCAB,
    H,
    S,
    batch,
    inputs_of,
    loss_and_gradients,
    megatron,
    plugged,
    token_losses,
)
from tests.ordered_models import EMBEDDING, first_stage, models, order_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

HEAD = {"output_layer.weight", "output_layer.bias"}


layouts = pytest.mark.parametrize(
    "tp, sp, tied",
    [(1, False, True), (2, False, False), (2, True, True), (4, True, False), (4, True, True)],
)


def by_token(x: Tensor, layer: Any) -> Tensor:
    """Rows of all ranks in the tokenizer's order."""
    whole = gather_tokens(x, layer.tp_group)
    return torch.cat([whole[layer.row_of_token], whole[len(layer.row_of_token) :]])


def in_tokenizers_order(model: Any, tied: bool, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters or gradients by name, those with ordered rows gathered."""
    layer = model.output_layer
    names = HEAD | ({EMBEDDING} if tied else set())
    if layer.vocab_order is None:
        gathered = {n: gather_tokens(x, layer.tp_group) for n, x in found.items() if n in names}
    else:
        gathered = {n: by_token(x, layer) for n, x in found.items() if n in names}
    return found | gathered


def both(given: tuple[Any, Any], tied: bool) -> list[tuple[Tensor, dict[str, Tensor]]]:
    results = []
    for model in given:
        loss, gradients = loss_and_gradients(model)
        results.append((loss, in_tokenizers_order(model, tied, gradients)))
    return results


def assert_same(expected: Any, found: Any) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.norm() > 0, name
        assert relative_rms(found[1][name], gradient) < 1e-5, name


def rank_training(group: Any, tp: int, sp: bool, tied: bool, padding: int) -> Any:
    vocab = VOCAB - padding
    given = models(tp, sp, tied, vocab, vocab_size=vocab)
    weights = [
        in_tokenizers_order(m, tied, {n: p.detach() for n, p in m.named_parameters()})
        for m in given
    ]
    assert all(torch.equal(weights[1][name], x) for name, x in weights[0].items())
    head = given[1].embedding.word_embeddings if tied else given[1].output_layer
    plain = given[0].embedding.word_embeddings if tied else given[0].output_layer
    assert not torch.equal(head.weight, plain.weight)
    tokens, labels = (ids.clamp(max=vocab - 1) for ids in batch())
    losses = [token_losses(model, tokens, labels) for model in given]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    return both(given, tied) if not padding else None


@layouts
def test_loss_and_every_gradient_are_those_without_an_order(
    pools: dict[int, RankPool], tp: int, sp: bool, tied: bool
) -> None:
    losses = []
    for expected, found in pools[tp].run(rank_training, tp, sp, tied, 0):
        assert_same(expected, found)
        losses.append(found[0])
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_a_padded_vocabulary(pools: dict[int, RankPool]) -> None:
    pools[2].run(rank_training, 2, True, True, 1)


def rank_ignored(group: Any) -> None:
    """An ignored token id, and the token whose row has this number."""
    given = models(2, True, False, ignore_index=17)
    tokens, labels = batch()
    labels = labels.clone()
    labels[0, :2] = torch.tensor([17, int(order_of().token_of_row[17])])
    expected, found = (token_losses(model, tokens, labels) for model in given)
    assert expected[0, 0] == 0 and expected[0, 1] > 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_ignore_index_is_a_token_id(pools: dict[int, RankPool]) -> None:
    pools[2].run(rank_ignored)


# --- real logits


def rank_logits(group: Any, tp: int, sp: bool, tied: bool) -> None:
    given = models(tp, sp, tied, softcap=5.0)
    for gather in (None, False, True):
        expected, found = (model(*inputs_of(batch()[0]), runtime_gather_output=gather)
                           for model in given)  # fmt: skip
        assert expected.shape[-1] == (VOCAB if gather else VOCAB // tp)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # A bias that the caller adds.
    for model in given:
        model.output_layer.skip_bias_add = True
    hidden = torch.randn(S // (tp if sp else 1), 3, H)
    weights = [model.shared_embedding_or_output_weight() if tied else None for model in given]
    results = [m.output_layer(hidden, weight=w) for m, w in zip(given, weights, strict=True)]
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@layouts
def test_real_logits_are_in_the_tokenizers_order(
    pools: dict[int, RankPool], tp: int, sp: bool, tied: bool
) -> None:
    pools[tp].run(rank_logits, tp, sp, tied)


def rank_hooks(group: Any, tp: int, sp: bool, tied: bool) -> Any:
    """Under a hook the loss is Megatron's, of real logits and labels of the tokenizer."""
    given = models(tp, sp, tied)
    for model in given:
        model.output_layer.register_forward_hook(lambda layer, args, out: (out[0] * 2, out[1]))
    return both(given, tied)


@layouts
def test_loss_and_gradients_of_real_logits(
    pools: dict[int, RankPool], tp: int, sp: bool, tied: bool
) -> None:
    for expected, found in pools[tp].run(rank_hooks, tp, sp, tied):
        assert_same(expected, found)


def rank_largest(group: Any, sp: bool) -> None:
    """Metrics of multi-token prediction turn a place into an id by adding the rank's first row."""
    plain, model = models(group.size(), sp, False)
    hidden = torch.randn(S // (group.size() if sp else 1), 3, H)
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


@pytest.mark.parametrize("tp, sp", [(1, False), (2, True)])
def test_the_largest_logit_is_a_tokens(pools: dict[int, RankPool], tp: int, sp: bool) -> None:
    pools[tp].run(rank_largest, sp)


# --- what else the rows meet


def rank_mtp(group: Any) -> Any:
    results = []
    orders: list[Any] = [None, order_of()]
    for order in orders:
        model = plugged(2, True, tied=True, mtp=2, vocab_order=order)
        loss, gradients = loss_and_gradients(model)
        results.append((loss, in_tokenizers_order(model, True, gradients)))
    return results


def test_multi_token_prediction(pools: dict[int, RankPool]) -> None:
    for expected, found in pools[2].run(rank_mtp):
        assert_same(expected, found)


def rank_fusion(group: Any, tied: bool) -> None:
    found = []
    for model in models(2, True, tied):
        model.output_layer.gradient_accumulation_fusion = True
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
        for step in range(2):
            uneven(token_losses(model, *batch(step))).backward()
        assert weight.grad_added_to_main_grad
        name = EMBEDDING if tied else "output_layer.weight"
        found.append(in_tokenizers_order(model, tied, {name: weight.main_grad})[name])
    assert found[0].norm() > 0
    assert relative_rms(found[1], found[0]) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_main_grad_has_the_same_rows(pools: dict[int, RankPool], tied: bool) -> None:
    pools[2].run(rank_fusion, tied)


def rank_first_stage(group: Any) -> None:
    """A pipeline stage with a tied embedding and no output layer."""
    expected = megatron(2, sp=False, tied=True)
    (stage,) = use_linear_cross_entropy([first_stage(2)], vocab_order=order_of())
    tokens, positions, _ = inputs_of(batch()[0])
    assert not torch.equal(stage.embedding.word_embeddings.weight,
                           expected.embedding.word_embeddings.weight)  # fmt: skip
    words = stage.embedding.word_embeddings
    assert torch.equal(stage.embedding(tokens, positions), expected.embedding(tokens, positions))
    assert torch.equal(words(input_=tokens), words(tokens))
    added = {"embedding.word_embeddings.row_of_token"}
    assert stage.state_dict().keys() - expected.state_dict().keys() == added


def test_a_first_stage_with_a_tied_embedding(pools: dict[int, RankPool]) -> None:
    pools[2].run(rank_first_stage)


def rank_left_alone(group: Any) -> None:
    def traces(model: Any) -> Any:
        """What a plug-in could leave on a module: attributes, buffers and hooks."""
        return {
            name: {
                key: len(x) if isinstance(x, dict | set) else id(x) for key, x in vars(m).items()
            }
            for name, m in model.named_modules()
        }

    stage = first_stage(2)
    before = traces(stage)
    assert use_linear_cross_entropy(stage) is stage
    assert traces(stage) == before
    use_linear_cross_entropy(stage, vocab_order=order_of())  # which such traces show
    assert traces(stage) != before


def test_a_first_stage_without_an_order_is_left_alone(pools: dict[int, RankPool]) -> None:
    pools[2].run(rank_left_alone)


def rank_refusals(group: Any) -> None:
    wrong: list[tuple[Any, str]] = [
        (torch.arange(VOCAB - 1), rf"each of vocab_size = {VOCAB} rows, got \({VOCAB - 1},\)"),
        (order_of(seed=group.rank()), r"order \w+ on rank 0 and order \w+ on rank 1"),
    ]
    for order, message in wrong:
        with pytest.raises(ValueError, match=f"^vocab_order must .*{message}"):
            use_linear_cross_entropy(megatron(2, True, False), vocab_order=order)
    model = megatron(2, True, False).to("meta")
    with pytest.raises(NotImplementedError, match="meta device; build it on the CPU"):
        use_linear_cross_entropy(model, vocab_order=order_of())


def test_wrong_orders_are_refused(pools: dict[int, RankPool]) -> None:
    pools[2].run(rank_refusals)
