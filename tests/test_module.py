"""LinearCrossEntropy: one weight whatever P is, in memory and on disk."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from flce_dist import linear_cross_entropy
from flce_dist.module import LinearCrossEntropy
from flce_dist.testing import run_ranks
from flce_dist.vocab import vocab_range

H, VOCAB = 24, 507  # 507 over 4: 127, 127, 127, 126
T = 16


def group_or_none(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    return group if group.size() > 1 else None


def make(group: dist.ProcessGroup | None, seed: int = 0, **kwargs: Any) -> LinearCrossEntropy:
    torch.manual_seed(seed)
    return LinearCrossEntropy(H, kwargs.pop("vocab_size", VOCAB), tp_group=group, **kwargs)


def init_rank(group: dist.ProcessGroup, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    layer = make(group_or_none(group), **kwargs)
    return layer.weight, torch.rand(4)  # and what the generator gives next


def save_rank(group: dist.ProcessGroup, path: Path) -> None:
    layer = make(group_or_none(group), bias=True, padded_vocab_size=512)
    with torch.no_grad():
        assert layer.bias is not None
        layer.bias.copy_(torch.arange(*layer.vocab_range))
    dcp.save({"head": layer.state_dict()}, checkpoint_id=path, no_dist=not layer.tp_group)


def load_rank(group: dist.ProcessGroup, path: Path) -> list[torch.Tensor]:
    layer = make(group_or_none(group), seed=1, bias=True, padded_vocab_size=512)
    state = {"head": layer.state_dict()}
    dcp.load(state, checkpoint_id=path, no_dist=not layer.tp_group)
    fresh = make(group_or_none(group), seed=2, bias=True, padded_vocab_size=512)
    fresh.load_state_dict(state["head"])
    assert fresh.bias is not None
    return [fresh.weight, fresh.bias]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(T, 2, H, generator=generator)
    labels = torch.randint(VOCAB, (T, 2), generator=generator)
    labels[3] = -100
    return hidden, labels


def step_rank(group: dist.ProcessGroup, *, sequence_parallel: bool) -> list[torch.Tensor]:
    layer = make(
        group_or_none(group), bias=True, padded_vocab_size=512, sequence_parallel=sequence_parallel
    )
    hidden, labels = inputs()
    if sequence_parallel:
        hidden = hidden.chunk(group.size())[group.rank()]
    hidden.requires_grad_()
    loss = layer(hidden, labels)
    loss.backward()
    assert layer.bias is not None
    logits = layer.logits(hidden)
    local = layer.logits(hidden, gather=False)
    gradients = [x.grad for x in (hidden, layer.weight, layer.bias) if x.grad is not None]
    return [loss, *gradients, logits, local]


@pytest.mark.parametrize("vocab_size", [512, 507, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_weight_does_not_depend_on_ranks(gloo_ranks, vocab_size, dtype):
    whole, after = gloo_ranks(1).run(init_rank, vocab_size=vocab_size, dtype=dtype)[0]
    assert whole.shape == (vocab_size, H)
    for P in (2, 4):
        shards = gloo_ranks(P).run(init_rank, vocab_size=vocab_size, dtype=dtype)
        for rank, (weight, next_drawn) in enumerate(shards):
            start, end = vocab_range(vocab_size, rank, P)
            assert torch.equal(weight, whole[start:end])
            assert torch.equal(next_drawn, after)


def test_initial_weight_does_not_depend_on_padding():
    assert torch.equal(make(None).weight, make(None, padded_vocab_size=640).weight[:VOCAB])


def test_initial_weight_is_normal_and_without_repetition():
    weight = make(None, vocab_size=20_000).weight.detach()
    assert weight.mean().abs() < 1e-4
    assert (weight.std() - 0.02).abs() < 1e-4
    assert len(weight.unique(dim=0)) == len(weight)
    other = make(None, vocab_size=20_000, seed=1).weight.detach()
    assert len(torch.cat([weight, other]).unique(dim=0)) == 2 * len(weight)


def test_initialisation_takes_megatrons_init_method():
    def init_method(weight):
        return nn.init.uniform_(weight, 1.0, 2.0)

    weight = make(None, init_method=init_method, bias=True).weight
    assert 1.0 <= weight.min() and weight.max() <= 2.0


def test_ranks_with_different_random_states_share_one_weight():
    def rank(group):
        return make(group, seed=group.rank(), vocab_size=128).weight

    first, second = run_ranks(rank, 2, backend="gloo")
    weight = torch.cat([first, second])
    assert any(torch.equal(weight, make(None, seed=s, vocab_size=128).weight) for s in range(2))


def test_parameters_carry_megatrons_attributes():
    for parameter in make(None, bias=True).parameters():
        assert vars(parameter) == {
            "tensor_model_parallel": True,
            "partition_dim": 0,
            "partition_stride": 1,
        }


def test_meta_device_is_filled_later():
    with torch.device("meta"):
        layer = make(None)
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    assert torch.equal(layer.weight, make(None).weight)


@pytest.fixture(scope="module")
def checkpoints(gloo_ranks, tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for P in (1, 2, 4):
        gloo_ranks(P).run(save_rank, root / str(P))
    return root


@pytest.mark.parametrize(("saved", "loaded"), list(itertools.product([1, 2, 4], repeat=2)))
def test_checkpoint_reshards(gloo_ranks, checkpoints, saved, loaded):
    whole = make(None, padded_vocab_size=512).weight
    shards = gloo_ranks(loaded).run(load_rank, checkpoints / str(saved))
    assert [len(weight) for weight, _ in shards] == [512 // loaded] * loaded
    assert torch.equal(torch.cat([weight for weight, _ in shards]), whole)
    assert torch.equal(torch.cat([bias for _, bias in shards]), torch.arange(512.0))


def uneven_round_trip(group: dist.ProcessGroup, path: Path) -> tuple[torch.Tensor, list[int]]:
    """507 rows over 4, and 5 over 4 (2, 2, 1, 0): saved here, then loaded by the caller."""
    layers = nn.ModuleDict({"large": make(group), "tiny": make(group, vocab_size=5)})
    dcp.save(layers.state_dict(), checkpoint_id=path)
    other = nn.ModuleDict({"large": make(group, seed=1), "tiny": make(group, seed=1, vocab_size=5)})
    state = other.state_dict()
    dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state)
    same = [torch.equal(a, b) for a, b in zip(layers.parameters(), other.parameters(), strict=True)]
    return torch.tensor(all(same)), [len(p) for p in other.parameters()]


def test_uneven_and_empty_shards_reshard(gloo_ranks, tmp_path):
    results = gloo_ranks(4).run(uneven_round_trip, tmp_path)
    assert all(same for same, _ in results)
    assert [rows for _, rows in results] == [[127, 2], [127, 2], [127, 1], [126, 0]]
    one = nn.ModuleDict({"large": make(None, seed=2), "tiny": make(None, seed=2, vocab_size=5)})
    state = one.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    one.load_state_dict(state)
    large, tiny = one.parameters()
    assert torch.equal(large, make(None).weight)
    assert torch.equal(tiny, make(None, vocab_size=5).weight)


def load_whole(group: dist.ProcessGroup, state: dict[str, torch.Tensor]) -> torch.Tensor:
    layer = make(group, seed=1)
    layer.load_state_dict(state)
    assert state["weight"].shape == (VOCAB, H)
    return layer.weight


def test_a_whole_weight_loads_into_shards(gloo_ranks):
    whole = make(None)
    shards = gloo_ranks(4).run(load_whole, whole.state_dict())
    assert torch.equal(torch.cat(shards), whole.weight)


def test_a_weight_of_another_size_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        make(None).load_state_dict(make(None, vocab_size=500).state_dict())


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("P", [2, 4])
def test_same_loss_gradients_and_logits_as_one_process(gloo_ranks, P, sequence_parallel):
    one = gloo_ranks(1).run(step_rank, sequence_parallel=False)[0]
    many = gloo_ranks(P).run(step_rank, sequence_parallel=sequence_parallel)
    dhidden = [rank[1] for rank in many]
    joined = [
        many[0][0],
        torch.cat(dhidden) if sequence_parallel else dhidden[0],
        torch.cat([rank[2] for rank in many]),
        torch.cat([rank[3] for rank in many]),
        many[0][4],
        torch.cat([rank[5] for rank in many], dim=-1),
    ]
    assert joined[4].shape == (T, 2, VOCAB)
    assert joined[5].shape == (T, 2, 512)
    for a, b in zip(joined, one, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(rank[0], many[0][0]) for rank in many)
    assert all(torch.equal(rank[4], many[0][4]) for rank in many)


def test_options_are_forwarded():
    options: dict[str, Any] = dict(
        reduction="sum", label_smoothing=0.1, z_loss_weight=1e-3, softcap=5.0, logit_scale=0.5
    )
    layer = make(None, bias=True, padded_vocab_size=520, ignore_index=-1, **options)
    hidden, labels = inputs()
    labels[3] = -1
    token_weight = torch.rand(labels.shape)
    assert layer.bias is not None
    expected = linear_cross_entropy(
        hidden,
        layer.weight[:VOCAB],
        labels,
        bias=layer.bias[:VOCAB],
        token_weight=token_weight,
        ignore_index=-1,
        **options,
    )
    torch.testing.assert_close(layer(hidden, labels, token_weight), expected)
    out = layer.forward_with_metrics(hidden, labels, token_weight)
    torch.testing.assert_close(out.loss, expected)
    logits = layer.logits(hidden)
    torch.testing.assert_close(out.lse[0], logits.logsumexp(-1)[0])


def test_repr_shows_the_shard_and_the_options():
    text = repr(make(None, padded_vocab_size=512, softcap=30.0, reduce_dhidden=False))
    for part in ("hidden_size=24", "vocab_size=507 (padded to 512)", "rows=[0, 512) of rank 0/1",
                 "softcap=30.0", "reduce_dhidden=False"):  # fmt: skip
        assert part in text
    assert "ignore_index" not in text


def test_wrong_padding_is_named():
    with pytest.raises(ValueError, match=r"padded_vocab_size .* vocab_size = 507, got 500"):
        make(None, padded_vocab_size=500)


def test_mutation_a_shard_of_the_wrong_rows_is_noticed(gloo_ranks):
    """The comparison of initial weights is not blind: rows of the next rank differ."""
    whole = gloo_ranks(1).run(init_rank)[0][0]
    shards = gloo_ranks(4).run(init_rank)
    start, end = vocab_range(VOCAB, 1, 4)
    assert not torch.equal(shards[0][0], whole[start:end])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_size": True}, ValueError, r"hidden_size must be an int .*, got True"),
        ({"vocab_size": 0}, ValueError, r"vocab_size must be an int .*, got 0"),
        ({"padded_vocab_size": 512.0}, ValueError, r"padded_vocab_size must .*, got 512\.0"),
        ({"label_smoothing": "0.1"}, ValueError, r"label_smoothing must .*, got '0\.1'"),
        ({"ignore_index": 2**70}, ValueError, r"ignore_index must .*, got 1180591620717411303424"),
        ({"tp_group": "tp"}, ValueError, r"tp_group must .*, got 'tp'"),
        ({"sequence_parallel": True}, ValueError, r"sequence_parallel=True needs a tp_group"),
        ({"reduction": "none", "schedule": "in_forward"}, NotImplementedError, "one scalar"),
        ({"tp_invariant": True, "impl": "eager"}, NotImplementedError, "needs impl='triton'"),
    ],
)
def test_options_are_checked_when_it_is_made(changes, error, message):
    sizes = {"hidden_size": H, "vocab_size": VOCAB} | changes
    with pytest.raises(error, match=message):
        LinearCrossEntropy(**sizes)


def test_sizes_and_options_of_numpy_are_plain_numbers():
    layer = LinearCrossEntropy(np.int64(H), np.int32(VOCAB), label_smoothing=np.float32(0.5))
    assert repr(layer) == repr(LinearCrossEntropy(H, VOCAB, label_smoothing=0.5))
