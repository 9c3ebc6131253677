"""LinearCrossEntropy: the same initial weight, loss and gradients on any number of ranks."""

import copy
import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from flce_dist import state_dtensors
from flce_dist.module import LinearCrossEntropy
from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import run_ranks
from tests.module_layouts import (
    EVERY_LAYOUT,
    LAYOUTS,
    PADDED,
    VOCAB,
    H,
    Layout,
    assert_same_state,
    check_attributes,
    each_layout,
    make,
    whole,
)
from tests.on_ranks import on_ranks
from tests.outcomes import Outcome
from tests.parallel_problem import Problem, complaint, misses


@pytest.mark.parametrize("vocab_size", [507, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("P", [2, 4])
@on_ranks("P")
def test_initial_weight_does_not_depend_on_ranks(group, vocab_size, dtype, P):
    """Nor does what the generator gives next."""
    expected, after = make(None, vocab_size=vocab_size, dtype=dtype).weight, torch.rand(4)
    shard = make(group, vocab_size=vocab_size, dtype=dtype).weight
    assert torch.equal(torch.rand(4), after)
    assert expected.shape == (vocab_size, H)
    assert torch.equal(shard, expected[slice(*vocab_range(vocab_size, group.rank(), P))])


def test_initial_weight_is_normal_without_repetition_and_the_same_with_padding():
    assert torch.equal(make(None).weight, make(None, padded_vocab_size=640).weight[:VOCAB])
    weight = make(None, vocab_size=20_000).weight.detach()
    assert weight.mean().abs() < 1e-4
    assert (weight.std() - 0.02).abs() < 1e-4
    assert len(weight.unique(dim=0)) == len(weight)
    filled = make(None, init_method=nn.init.ones_, bias=True).weight  # as Megatron passes
    assert (filled == 1.0).all()


@each_layout
@on_ranks("layout")
def test_meta_device_is_filled_later(group, layout):
    one, layer = make(None, bias=True), layout.make(on_meta=True, bias=True)
    for made in (one, layer):
        check_attributes(made)
    assert_same_state(whole(layer.state_dict()), one.state_dict())


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, fsdp=2)])
@on_ranks("layout")
def test_ranks_with_different_random_states_share_one_weight(group, layout):
    layer = layout.make()
    torch.manual_seed(group.rank())
    layer.reset_parameters()
    weight, seeds = whole(layer.state_dict())["weight"], range(layout.size)
    assert sum(torch.equal(weight, make(None, seed=seed).weight) for seed in seeds) == 1


PROBLEM = Problem(
    V_all=500, rows=507, ignored=0.0,
    options={
        "reduction": "sum", "z_loss_weight": 1e-3, "logit_scale": 0.5, "softcap": 2.0,
        "token_weight": torch.linspace(0, 2, 24),
    },
)  # fmt: skip
PROBLEM.options["ignore_index"] = int(PROBLEM.tensors[3][5])


def step_rank(group: Any, layout: Layout, problem: Problem, schedule: Any, sp: bool) -> Outcome:
    """The data-parallel ranks have a part of the tokens each; FSDP2 averages over them."""
    options, (hidden, weight, bias, labels) = {**problem.options}, problem.tensors
    token_weight = options.pop("token_weight")
    layer = layout.make(
        hidden_size=problem.H, vocab_size=problem.V_all, padded_vocab_size=problem.n_rows,
        bias=True, schedule=schedule, sequence_parallel=sp, on_meta=True, **options,
    )  # fmt: skip
    layer.load_state_dict({"weight": weight, "bias": bias})
    parts = layout.size // layout.tp
    part, tp_rank = divmod(group.rank(), layout.tp)
    hidden, labels, token_weight = (x.chunk(parts)[part] for x in (hidden, labels, token_weight))
    expected = 2.0 * torch.tanh((0.5 * hidden @ weight.T + bias) / 2.0)
    hidden = (hidden.chunk(layout.tp)[tp_rank] if sp else hidden).clone().requires_grad_()
    loss = layer(hidden, labels, token_weight)
    loss.backward(problem.upstream)
    assert hidden.grad is not None and layer.bias is not None
    assert layer.weight.grad is not None and layer.bias.grad is not None

    register_fsdp_forward_method(layer, "forward_with_metrics")
    register_fsdp_forward_method(layer, "logits")
    assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    assert_close(layer.forward_with_metrics(hidden, labels, token_weight).loss, loss)
    assert_close(layer.logits(hidden), expected[:, : problem.V_all])
    assert_close(layer.logits(hidden, gather=False), expected[:, slice(*layer.vocab_range)])

    for name, parameter in layer.named_parameters():
        parameter.detach().copy_(getattr(layer, name).grad)
    gradients = whole(layer.state_dict())
    dweight, dbias = parts * gradients["weight"], parts * gradients["bias"]
    return Outcome.of(loss, hidden.grad, dweight, dbias)


@pytest.mark.parametrize("schedule", ["recompute", "in_forward"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@each_layout
def test_loss_gradients_and_logits(layout, sequence_parallel, schedule, pools):
    sp = sequence_parallel and layout.tp > 1
    ranks = pools[layout.size].run(step_rank, layout, PROBLEM, schedule, sp)
    parts = ranks[:: layout.tp]
    loss = torch.stack([part.loss for part in parts]).sum()
    dhidden = torch.cat([rank.dhidden for rank in (ranks if sp else parts)])
    for i, rank in enumerate(ranks):
        assert misses(rank.changed(loss=loss, dhidden=dhidden), PROBLEM) == []
        assert torch.equal(rank.loss, parts[i // layout.tp].loss)


@on_ranks(4)
def test_deep_copies_under_fsdp(group):
    """Copied before it is sharded, or as part of a module that is; PyTorch refuses any other."""
    tp_group, mesh = Layout(tp=2, fsdp=2).meshes()
    layer, part = make(tp_group, bias=True), make(tp_group, bias=True)
    copied = copy.deepcopy(layer)
    check_attributes(copied)
    for module in (layer, copied, nn.Sequential(part)):
        fully_shard(module, mesh=mesh)
    copied_part = copy.deepcopy(part)
    for original in (layer, part):
        original.weight.detach().zero_()
    for ours in (copied, copied_part):
        assert isinstance(ours, LinearCrossEntropy) and isinstance(ours.weight, DTensor)
        assert ours.tp_group is tp_group and ours.init_method is layer.init_method
        assert_same_state(whole(ours.state_dict()), make(None, bias=True).state_dict())


def test_repr_shows_the_shard_and_the_options():
    text = repr(make(None, padded_vocab_size=512, softcap=30.0))
    parts = "hidden_size=24", "507 (padded to 512)", "rows=[0, 512) of rank 0/1", "softcap=30"
    assert all(part in text for part in parts), text
    assert "ignore_index" not in text


def test_logits_under_autocast_are_those_of_a_linear_layer():
    layer = LinearCrossEntropy(8, 16, bias=True)
    assert layer.bias is not None
    torch.nn.init.normal_(layer.bias)
    hidden = torch.randn(4, 8)
    linear = torch.nn.functional.linear
    with torch.autocast("cpu", torch.bfloat16):
        z, expected = layer.logits(hidden), linear(hidden, layer.weight, layer.bias)
        with pytest.raises(ValueError, match=r"got torch\.float64: pass .*casts no torch\.float64"):
            layer.logits(hidden.double())
    assert z.dtype == expected.dtype == torch.bfloat16
    assert (z - expected).abs().max() < 0.1  # some roundings of bf16


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"hidden_size": True}, ValueError, r"hidden_size must be an int .*, got True"),
    ({"padded_vocab_size": 500}, ValueError, r"padded_vocab_size .* vocab_size = 507, got 500"),
    ({"tp_group": "tp"}, ValueError, r"tp_group must .*, got 'tp'"),
    ({"bias": None}, ValueError, "bias must be a bool, got None"),
    ({"init_method": "normal"}, ValueError, "init_method must be a function, got 'normal'"),
    ({"dtype": torch.int32}, ValueError, r"dtype must be None or torch.float32.*torch\.int32"),
])  # fmt: skip
def test_options_are_checked_when_it_is_made(changes, error, message):
    sizes = {"hidden_size": H, "vocab_size": VOCAB} | changes
    with pytest.raises(error, match=message):
        LinearCrossEntropy(**sizes)


@pytest.mark.parametrize(("hidden", "gather", "message"), [
    (torch.zeros(2, H - 1), True, r"hidden must be \[..., H\] with H = 24 .*, got \(2, 23\)"),
    (torch.zeros(2, H).double(), True, "hidden must have weight's dtype torch.float32, got .*64"),
    (torch.zeros(2, H).long(), True, "hidden must have dtype torch.float32, .*, got torch.int64"),
    (None, True, "hidden must be a torch.Tensor, got NoneType"),
    (torch.zeros(2, H), "no", "gather must be a bool, got 'no'"),
])  # fmt: skip
def test_what_logits_are_asked_of_is_checked(hidden, gather, message):
    with pytest.raises(ValueError, match=message):
        make(None).logits(hidden, gather=gather)


@pytest.mark.parametrize("shape", [(VOCAB - 3, H), (VOCAB + 5, H), (VOCAB,)], ids=str)
def test_a_weight_of_other_rows_is_refused(shape):
    layer = make(None)
    layer.weight = torch.nn.Parameter(torch.zeros(shape))
    hidden = torch.zeros(2, H)
    labels = torch.zeros(2, dtype=torch.long)
    texts = {complaint(layer.logits, hidden), complaint(layer, hidden, labels)}
    texts.add(complaint(layer.forward_with_metrics, hidden, labels))
    assert texts == {
        f"weight must be [V, H] with V = {layer.padded_vocab_size} rows of this rank, got "
        f"{shape}: make a LinearCrossEntropy of another vocab_size"
    }


@pytest.mark.parametrize("rows", [1, VOCAB - 3])
def test_a_bias_of_other_rows_is_refused(rows):
    """That of one row would be added to all columns of the logits."""
    layer = make(None, bias=True)
    layer.bias = torch.nn.Parameter(torch.zeros(rows))
    hidden = torch.zeros(2, H)
    labels = torch.zeros(2, dtype=torch.long)
    texts = {complaint(layer.logits, hidden), complaint(layer, hidden, labels)}
    expected = f"bias must be [V] with V = {layer.padded_vocab_size} from weight, got ({rows},)"
    assert texts == {expected}


def test_a_parametrized_weight_is_made_once_in_each_call():
    """Spectral norm would make a step of its power iteration each time."""
    made = []

    class Twice(torch.nn.Module):
        def forward(self, weight):
            made.append(weight)
            return 2 * weight

    layer = make(None)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Twice())
    hidden = torch.zeros(2, H)
    labels = torch.zeros(2, dtype=torch.long)
    calls = (
        lambda: layer(hidden, labels),
        lambda: layer.forward_with_metrics(hidden, labels),
        lambda: layer.logits(hidden),
    )
    for call in calls:
        made.clear()
        call()
        assert len(made) == 1


@pytest.mark.parametrize(("shape", "dim", "expected"), [
    ((H,), 0, r"\[T / P, ..., H\]"),
    ((H,), 1, r"\[B, S / P, ..., H\] with sequence_dim=1"),
    ((2, H), 1, r"\[B, S / P, ..., H\] with sequence_dim=1"),
])  # fmt: skip
def test_logits_need_the_dimension_that_is_split(shape, dim, expected):
    def rank(group: Any) -> str:
        layer = make(group, sequence_parallel=True, sequence_dim=dim)
        texts = [complaint(layer.logits, torch.zeros(shape), gather=x) for x in (True, False)]
        assert texts[0] == texts[1]
        return texts[0]

    for said in run_ranks(rank, 2):
        assert re.match(rf"hidden must be {expected} under sequence_parallel=True, got \(", said)


def test_sizes_and_options_of_numpy_are_plain_numbers():
    layer = LinearCrossEntropy(np.int64(H), np.int32(VOCAB), label_smoothing=np.float32(0.5))
    assert repr(layer) == repr(LinearCrossEntropy(H, VOCAB, label_smoothing=0.5))


UNEVEN = {"large": VOCAB, "tiny": 5}
UNEVEN_ROWS = {  # of each rank
    Layout(tp=4): [[127, 2], [127, 2], [127, 1], [126, 0]],
    Layout(tp=2, fsdp=2): [[127, 2], [127, 1], [127, 1], [126, 1]],
}


def heads(layout: Layout, seed: int, *, on_meta: bool = False) -> nn.ModuleDict:
    sizes: dict[str, Any] = {"seed": seed, "padded_vocab_size": PADDED, "on_meta": on_meta}
    layers = {"plain": layout.make(bias=True, **sizes)}
    for name, n in UNEVEN.items():
        layers[name] = layout.make(seed=seed, vocab_size=n, on_meta=on_meta)
    return nn.ModuleDict(layers)


def save_rank(group: dist.ProcessGroup, layout: Layout, path: Path) -> None:
    layers = heads(layout, seed=0)
    plain = layers["plain"]
    plain.load_state_dict({**whole(plain.state_dict()), "bias": torch.arange(float(PADDED))})
    dcp.save(layers.state_dict(), checkpoint_id=path, no_dist=layout.size == 1)


RESHARDED = [
    (i, layout)
    for (i, saved), layout in itertools.product(enumerate(LAYOUTS), EVERY_LAYOUT)
    if layout == Layout() or Layout(tp=2, fsdp=2) in (saved, layout)
]
"""Every layout's checkpoint on one rank, and by and on ranks that are cut in both ways."""


@pytest.fixture(scope="module")
def checkpoints(pools, tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for i, layout in enumerate(LAYOUTS):
        pools[layout.size].run(save_rank, layout, root / str(i))
    return root


@pytest.mark.parametrize(("saved", "layout"), RESHARDED, ids=str)
@on_ranks("layout")
def test_checkpoint_reshards(group, checkpoints, saved, layout):
    expected = heads(Layout(), seed=0).state_dict()
    expected["plain.bias"] = torch.arange(float(PADDED))
    state = heads(layout, seed=1).state_dict()
    dcp.load(state, checkpoint_id=checkpoints / str(saved), no_dist=layout.size == 1)
    for assign in (False, True):
        fresh = heads(layout, seed=2, on_meta=assign)
        fresh.load_state_dict(state, assign=assign)
        lengths = [len(state_dtensors.local_part(p)[0]) for p in fresh.parameters()]
        assert lengths[:2] == [PADDED // (layout.tp * layout.fsdp)] * 2
        if layout in UNEVEN_ROWS:
            assert lengths[2:] == UNEVEN_ROWS[layout][group.rank()]
        assert_same_state(whole(fresh.state_dict()), expected)
        for layer in fresh.values():
            check_attributes(layer)


@each_layout
@on_ranks("layout")
def test_a_plain_weight_loads_into_shards(group, layout):
    """The whole, and this tensor-parallel rank's rows of it."""
    state = make(None).state_dict()
    for rows in (slice(None), slice(*layout.make().vocab_range)):
        layer = layout.make(seed=1)
        layer.load_state_dict({name: x[rows] for name, x in state.items()})
        assert_same_state(whole(layer.state_dict()), state)
        layer.load_state_dict({name: x[rows].clone() for name, x in state.items()}, assign=True)
        assert_same_state(whole(layer.state_dict()), state)
        for parameter in layer.parameters():  # none keeps rows of others; FSDP2 pads by one
            local, _ = state_dtensors.local_part(parameter)
            assert local.untyped_storage().nbytes() <= local.nbytes + local[:1].nbytes
        check_attributes(layer)
    assert state["weight"].shape == (VOCAB, H)


@each_layout
@on_ranks("layout")
def test_a_weight_of_another_size_is_refused(group, layout):
    layer = layout.make()
    shapes = (500, H), (600, H), (VOCAB, H + 1), (VOCAB,), (H,)
    wrong = [{"weight": torch.zeros(shape)} for shape in shapes]
    wrong.append(layout.make(vocab_size=VOCAB + 1).state_dict())  # some ranks hold as many rows
    for state, assign in itertools.product(wrong, (False, True)):
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            layer.load_state_dict(state, assign=assign)
