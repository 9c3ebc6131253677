"""Orders of the vocabulary: every rank keeps as many tiles as the others; layers with an order."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.filtered import VocabOrder, frequency_order
from flce_dist.filtered.order_checks import agreed_order
from flce_dist.filtered.vocab_order import TILE_V, as_vocab_order, rows_of
from flce_dist.module import LinearCrossEntropy
from tests.module_layouts import ORDER, PADDED, VOCAB, H, Layout, make, order_of, whole
from tests.on_ranks import on_ranks


def test_equal_counts_go_by_token_id_and_bits_do_not_vary():
    for n in (1, 255, 256):
        assert torch.equal(frequency_order(torch.zeros(n)).token_of_row, torch.arange(n))
    counts = torch.zeros(1000, dtype=torch.long)
    counts[700] = 1
    order = frequency_order(counts)
    first = int(order.row_of_token[700])
    assert first % TILE_V == 0 and order.token_of_row[first:][:4].tolist() == [700, 0, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(order, frequency_order(counts), strict=True))
    assert torch.equal(frequency_order(counts.float()).token_of_row, order.token_of_row)


@pytest.mark.parametrize(
    "vocab_size, rows", [(131072, 131072), (128256, 129024), (128256, 128256), (50257, 50304)]
)
@pytest.mark.parametrize("P", [1, 2, 4, 8, 16, 32, 64])
def test_every_rank_gets_the_same_tiles_or_one_more(P, vocab_size, rows):
    """However many of the most frequent tiles are kept, until the first shard is full."""
    counts = vocab_size - torch.arange(vocab_size)
    tokens = frequency_order(counts, padded_vocab_size=rows).token_of_row
    level = tokens[: vocab_size // TILE_V * TILE_V : TILE_V] // TILE_V  # of each tile
    middle = TILE_V * torch.arange(len(level)) + TILE_V // 2
    in_turns = 64 * int((middle * 64 // rows).bincount().min())
    ranks = (middle * P // rows)[level.argsort()][:in_turns]
    dealt = torch.nn.functional.one_hot(ranks, P).cumsum(0)
    assert in_turns > 0 and (dealt.max(1).values - dealt.min(1).values).max() <= 1


def test_rows_of_labels():
    order = as_vocab_order(torch.tensor([2, 0, 3, 1]), 4)
    labels = torch.tensor([[0, 1, 2], [3, -100, 4]])
    for dtype in (torch.int64, torch.int32):
        rows = rows_of(labels.to(dtype), order.row_of_token)
        assert rows.dtype == dtype
        assert rows.tolist() == [[1, 3, 0], [2, -100, 4]]
    assert rows_of(labels.float(), order.row_of_token).dtype == torch.float32
    assert rows_of(torch.tensor(3), order.row_of_token) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0, 1, 2], "be a VocabOrder or an int64 tensor, got list"),
        (torch.arange(3.0), "be a VocabOrder or an int64 tensor, got torch.float32"),
        (torch.arange(4), r"each of vocab_size = 3 rows, got \(4,\)"),
        (torch.tensor([0, 1, -1]), "each of 3 token ids once"),
        ({"counts": torch.zeros(2, 3)}, r"counts must be \[V_all\], got \(2, 3\)"),
        ({"counts": [1, 2, 3]}, r"counts must be a tensor \[V_all\], got list"),
        ({"counts": torch.tensor([4, -0.5])}, "counts must be at least 0, got -0.5"),
        ({"counts": torch.zeros(5), "padded_vocab_size": 4}, "padded.* at least V_all = 5, got 4"),
    ],
)
def test_wrong_orders_and_counts_are_refused(given, message):
    of_counts = isinstance(given, dict)
    with pytest.raises(
        ValueError, match=f"^{'' if of_counts else 'vocab_order must .*'}{message}$"
    ):
        frequency_order(**given) if of_counts else as_vocab_order(given, 3)


def make_order(kind: str) -> VocabOrder | None:
    if kind == "twice":
        return as_vocab_order(torch.zeros(VOCAB, dtype=torch.long), VOCAB)
    if kind == "short":
        return as_vocab_order(torch.arange(3), VOCAB)
    return None if kind == "none" else order_of(int(kind))


DIFFER = "vocab_order must be the same on all ranks, got "
ONCE = "vocab_order must contain each of 507 token ids once"
SHAPE = r"vocab_order must have the token of each of vocab_size = 507 rows, got \(3,\)"


@pytest.mark.parametrize("layout", [Layout(tp=4), Layout(tp=2, fsdp=2), Layout(fsdp=2, replicas=2)])
@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ("3 3 3 3", ""),
        ("none none none none", ""),
        ("0 0 0 1", rf"{DIFFER}order \w+ on ranks 0, 1, 2 and order \w+ on rank 3"),
        ("0 none 0 0", rf"{DIFFER}order \w+ on ranks 0, 2, 3 and None on rank 1"),
        ("twice twice short short",
         rf"{DIFFER}.* \({ONCE}\) on ranks 0, 1 and .* \({SHAPE}\) on ranks 2, 3"),
        ("twice twice twice twice", ONCE),  # an error of all ranks is raised as it is
    ],
)  # fmt: skip
@on_ranks("layout")
def test_all_ranks_say_the_same(group, kinds, said, layout):
    """And none waits for another; this rank's own order is returned if nothing is said."""
    tp_group, mesh = layout.meshes()
    groups = [tp_group, *([] if mesh is None else mesh.get_all_groups())]
    mine: list[VocabOrder | None] = []

    def make() -> VocabOrder | None:
        mine.append(make_order(kinds.split()[group.rank()]))
        return mine[0]

    if not said:
        assert agreed_order(make, torch.empty(0), groups) is mine[0]
        return
    with pytest.raises(ValueError) as caught:
        agreed_order(make, torch.empty(0), groups)
    everywhere = [""] * layout.size
    dist.all_gather_object(everywhere, str(caught.value))
    assert re.fullmatch(said, everywhere[0]) and len({*everywhere}) == 1, everywhere


# --- LinearCrossEntropy with an order: the same training, up to the order of its rows

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
