"""LinearCrossEntropy with a vocab_order: the same training, up to the order of its rows."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist.module import LinearCrossEntropy
from tests.module_layouts import ORDER, PADDED, VOCAB, H, Layout, make, order_of, whole
from tests.on_ranks import on_ranks

T = 16


def moved(x: Tensor, rows: Tensor) -> Tensor:
    return torch.cat([x[rows], x[VOCAB:]])


def inputs(ignore_index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(T, H, generator=generator)
    labels = torch.randint(VOCAB, (T,), generator=generator)
    labels[3] = ignore_index
    labels[4] = ORDER.token_of_row[ignore_index]  # the token whose row has the ignored id
    return hidden, labels


def results(layer: LinearCrossEntropy, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
    if layer.sequence_parallel:
        hidden = hidden.chunk(layer.P)[layer.rank]
    hidden = hidden.clone().requires_grad_()
    found = layer.forward_with_metrics(hidden, labels)._asdict()
    found |= {"again": layer(hidden, labels), "logits": layer.logits(hidden)}
    found["again"].backward()
    found["dhidden"] = hidden.grad
    for name, parameter in layer.named_parameters():
        parameter.detach().copy_(getattr(layer, name).grad)
        found[f"d{name}"] = whole(layer.state_dict())[name]
    return {name: x.detach().clone() for name, x in found.items()}


@pytest.mark.parametrize("ignore_index", [-100, 17])
@pytest.mark.parametrize("P, sp", [(1, False), (2, False), (4, True)])
@on_ranks("P")
def test_training_is_the_same_up_to_the_order_of_rows(group, P, sp, ignore_index):
    options: dict[str, Any] = dict(
        bias=True, padded_vocab_size=PADDED, sequence_parallel=sp, ignore_index=ignore_index,
        label_smoothing=0.1, z_loss_weight=1e-3,
    )  # fmt: skip
    tp_group = group if P > 1 else None
    reference = make(tp_group, **options)
    layer = make(tp_group, seed=1, vocab_order=ORDER, **options)
    bias = torch.randn(PADDED, generator=torch.Generator().manual_seed(3))
    state = {"weight": whole(reference.state_dict())["weight"], "bias": bias}
    reference.load_state_dict(state)
    rows = {name: moved(x, ORDER.token_of_row) for name, x in state.items()}
    layer.load_state_dict({**rows, "row_of_token": ORDER.row_of_token})
    hidden, labels = inputs(ignore_index)
    expected = results(reference, hidden, labels)
    found = results(layer, hidden, labels)
    for name in ("dweight", "dbias"):
        found[name] = moved(found[name], ORDER.row_of_token)
    assert found.keys() == expected.keys()
    assert expected["dweight"].norm() > 0 and expected["dbias"].norm() > 0
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-5, atol=1e-6, msg=name)
    assert found["again"] == found["loss"]


def test_shards_of_logits_stay_in_the_order_of_rows():
    layer = make(None, vocab_order=ORDER)
    hidden = torch.randn(3, H)
    local, gathered = layer.logits(hidden, gather=False), layer.logits(hidden)
    assert torch.equal(gathered, local[:, ORDER.row_of_token])
    assert not torch.equal(gathered, local)


def test_labels_out_of_range_are_refused_as_ever():
    layer = make(None, vocab_order=ORDER, padded_vocab_size=PADDED)
    for label in (VOCAB, PADDED, -1):
        with pytest.raises(ValueError, match=f"labels must be within .*, got {label} at token 1"):
            layer(torch.randn(2, H), torch.tensor([5, label]))


def test_copies_compiled_ones_and_the_repr_have_the_order():
    layer = make(None, vocab_order=ORDER.token_of_row, reduction="sum")
    assert "vocab_order=True" in repr(layer) and "vocab_order" not in repr(make(None))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for other in (copy.deepcopy(layer), compiled):
        torch.testing.assert_close(other(*inputs(-100)), layer(*inputs(-100)))
    with pytest.raises(ValueError, match=r"each of vocab_size = 507 rows, got \(512,\)"):
        make(None, vocab_order=torch.arange(512), padded_vocab_size=512)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, fsdp=2)])
@pytest.mark.parametrize("other", [None, order_of(seed=1)], ids=["none", "another"])
@on_ranks("layout")
def test_all_ranks_refuse_orders_that_differ(group, layout, other):
    """None waits for another; over a data-parallel mesh they compare when weights are drawn."""
    last = layout.size - 1
    with pytest.raises(ValueError, match=rf"^vocab_order must be the same .* on rank {last}$"):
        layout.make(vocab_order=other if group.rank() == last else ORDER, on_meta=layout.fsdp > 1)


@pytest.mark.parametrize("strict", [True, False])
def test_rows_of_another_order_or_none_are_refused(strict):
    layer, without = make(None, vocab_order=ORDER), make(None)
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match=r"no row_of_token.*vocab_order convert --to ordered"):
        layer.load_state_dict(without.state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match=r"have a vocab_order .*vocab_order convert --to plain"):
        without.load_state_dict(layer.state_dict(), strict=strict)
    other = make(None, vocab_order=order_of(seed=1))
    with pytest.raises(RuntimeError, match=r"another vocab_order .*\.argsort\(\)"):
        layer.load_state_dict(other.state_dict(), strict=strict)
    assert torch.equal(layer.weight, before)
    order = other.state_dict()["row_of_token"].argsort()  # as the message says
    make(None, vocab_order=order).load_state_dict(other.state_dict(), strict=strict)


def test_other_layers_load_without_it():
    """A state dict of the rest of the model says nothing about rows."""
    layers = {"trunk": torch.nn.Linear(2, 2), "head": make(None, vocab_order=ORDER)}
    model = torch.nn.ModuleDict(layers)
    model.load_state_dict({"trunk.bias": torch.ones(2)}, strict=False)
