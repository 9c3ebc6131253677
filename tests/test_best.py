"""``linear_top_k`` on one rank: ids, log-probabilities, the label's rank, nuclei."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl

from flce_dist import linear_logprob
from flce_dist.kernels import tuning
from flce_dist.kernels.best import chunks, eager, shard_pass, winners
from flce_dist.kernels.logits.launching import TileLaunch, tile_launch
from flce_dist.kernels.logits.operands import ShardLogits
from tests.best_problem import (
    Asked,
    T,
    V,
    best,
    close,
    compare,
    compare_real,
    equal,
    problem,
    real_problem,
    reference,
    same_bits,
)
from tests.problems import both, each_dtype, interpreted, poisoned_memory, with_logits

sizes = pytest.mark.parametrize("k", [None, 1, 2, 40])


@sizes
@each_dtype
@both
def test_ties_and_ranks_are_those_of_a_stable_sort(
    impl: str, dtype: torch.dtype, k: int | None
) -> None:
    with poisoned_memory():
        asked = problem(dtype, k)
        compare(best(asked, impl), asked)


@both
def test_without_labels_no_token_is_ignored(impl: str) -> None:
    asked = problem(labelled=False)
    found = best(asked, impl)
    compare(found, asked)
    assert found.label_rank is None and found.label_logprob is None


@sizes
def test_in_fp64(k: int | None) -> None:
    asked = problem(torch.float64, k)
    compare(best(asked), asked)


@both
@pytest.mark.parametrize("k", [1, 7])
@pytest.mark.parametrize("options", [
    {"softcap": 3.0},
    {"logit_scale": -0.25},
    {"temperature": 0.6},
    {"temperature": torch.linspace(0.2, 3, T), "softcap": 5.0, "logit_scale": 2.0},
    {"vocab_size": V, "rows": V + 10},
], ids=str)  # fmt: skip
def test_options(impl: str, options: dict[str, Any], k: int) -> None:
    asked = real_problem(k=k, **options)
    compare_real(best(asked, impl), asked, 1e-4)


@interpreted
@pytest.mark.parametrize("k", [2, 40])
@pytest.mark.parametrize("shift", [0.0, -100.0], ids=["both signs", "all negative"])
def test_blocks_are_less_than_a_tile(shift: float, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, whose tiles are larger. The bound has few bits, also of negative logits."""
    asked = problem(k=k)
    assert asked.bias is not None
    asked = replace(asked, bias=asked.bias + shift)
    expected = best(asked, "triton")
    monkeypatch.setattr(shard_pass, "BLOCK_COLUMNS", 16)
    found = best(asked, "triton")
    compare(found, asked)
    assert same_bits(found, expected)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_of_half_operands(impl: str, dtype: torch.dtype) -> None:
    """Whose logits are fp32 sums: no id is closer to its neighbour than that."""
    asked = real_problem(dtype, 9)
    compare_real(best(asked, impl), asked, 1e-4)


@both
@pytest.mark.parametrize("left", [0, 1, 3])
def test_more_ids_are_asked_for_than_are_not_banned(impl: str, left: int) -> None:
    asked = problem(labelled=False)
    assert asked.bias is not None
    asked.bias[:] = -torch.inf
    asked.bias[torch.tensor([300, 70, 2][:left], dtype=torch.long)] = 1.0
    found = best(asked, impl)
    compare(found, asked)
    assert found.ids is not None and ((found.ids >= 0).sum(1) == left).all()


@both
@pytest.mark.parametrize("k", [1, 5, V])
def test_all_logits_are_equal(impl: str, k: int) -> None:
    z, labels = torch.full((2, V), 3.0), torch.tensor([0, V - 1])
    inputs = with_logits(z, labels)
    asked = Asked(inputs.hidden, inputs.weight, None, k, {"labels": labels})
    found = best(asked, impl)
    compare(found, asked)
    assert found.label_rank is not None and found.label_rank.tolist() == [0, V - 1]


@both
@pytest.mark.parametrize("k", [1, 4])
def test_extreme_logits(impl: str, k: int) -> None:
    """One far above, all far below -88, both zeros, and a span that no exponential has."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(6, V, generator=g)
    z[0, 200] = 1e4
    z[1] -= 500.0
    z[2] = torch.where(torch.arange(V) % 2 == 0, 0.0, -0.0)
    z[3] = torch.linspace(-1e5, 1e5, V)
    z[4] = z[3].flip(0)
    z[5] *= 1e30
    labels = torch.tensor([200, 5, 7, V - 1, V - 1, 0])
    inputs = with_logits(z, labels)
    asked = Asked(inputs.hidden, inputs.weight, None, k, {"labels": labels})
    found, truth = best(asked, impl), reference(asked)
    assert equal(found.ids, truth.ids) and equal(found.label_rank, truth.label_rank)
    for t in range(6):
        close(found.lse[t], truth.lse[t])
    assert found.logprob is not None and found.logprob[0, 0] == 0.0


@both
@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_has_no_id(impl: str, k: int | None, bad: float) -> None:
    """Of a token alone; of a column in every token, whatever its logits' place."""
    asked = problem(k=k, labelled=False)
    asked = asked.changed(labels=torch.zeros(T, dtype=torch.long))
    asked.hidden[4] = bad
    found = best(asked, impl)
    others = torch.arange(T) != 4
    compare(
        found._replace(**{name: x[others] for name, x in found._asdict().items() if x is not None}),
        replace(asked, hidden=asked.hidden[others]).changed(labels=asked.options["labels"][others]),
    )
    weight = asked.weight.clone()
    weight[123] = torch.nan
    everywhere = best(replace(asked, weight=weight), impl)
    for of, t in ((found, slice(4, 5)), (everywhere, slice(None))):
        assert of.label_rank is not None and of.label_logprob is not None
        assert of.lse[t].isnan().all() and of.label_logprob[t].isnan().all()
        assert (of.label_rank[t] == -1).all()
        if of.ids is not None and of.logprob is not None:
            assert (of.ids[t] == -1).all() and of.logprob[t].isnan().all()


@both
@pytest.mark.parametrize("k", [None, 1, 4])
def test_no_tokens(impl: str, k: int | None) -> None:
    asked = problem(k=k, tokens=0)
    found = best(asked, impl)
    assert found.lse.shape == (0,) and found.label_rank is not None
    if k is not None:
        assert found.ids is not None and found.ids.shape == (0, k)
        ids, offsets = found.csr()
        assert ids.shape == (0,) and offsets.tolist() == [0]


@both
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_nucleus(impl: str, top_p: float) -> None:
    asked = replace(real_problem(k=30), options={"top_p": top_p, "temperature": 0.7})
    found, truth = best(asked, impl), reference(asked)
    assert equal(found.ids, truth.ids)
    close(found.logprob, truth.logprob)
    whole = reference(replace(asked, options={"temperature": 0.7}, k=V))
    assert whole.logprob is not None and found.ids is not None
    size = 1 + (whole.logprob.exp().cumsum(1) < top_p).sum(1)
    assert torch.equal((found.ids >= 0).sum(1), size.clamp_max(30))


@both
def test_a_nucleus_is_what_scores_take(impl: str) -> None:
    """As CSR, or with padding: the same distribution over the token's own ids."""
    asked = replace(real_problem(k=30), options={"top_p": 0.8})
    found = best(asked, impl)
    ids, offsets = found.csr()
    assert found.ids is not None and len(ids) < found.ids.numel()
    take = dict(bias=asked.bias, over="ids")
    flat = linear_logprob(asked.hidden, asked.weight, ids, offsets=offsets, **take)  # type: ignore[arg-type]
    padded = linear_logprob(asked.hidden, asked.weight, found.ids, **take)  # type: ignore[arg-type]
    assert torch.equal(padded.logprob[found.ids >= 0], flat.logprob)
    assert found.logprob is not None
    close(padded.logprob.where(found.ids >= 0, -torch.inf), found.logprob.double().log_softmax(1))


@both
def test_only_tokens_that_count(impl: str) -> None:
    asked = problem()
    everywhere = best(asked, impl)
    fewer = best(asked.changed(max_counted=T - 1), impl)
    assert same_bits(fewer, everywhere)
    with pytest.raises(ValueError, match="max_counted must be at least the 10 tokens"):
        best(asked.changed(max_counted=9))


@both
def test_shapes_and_strides(impl: str) -> None:
    asked = problem()
    labels = asked.options["labels"].view(3, 4)
    hidden = asked.hidden.repeat_interleave(2, 1)[:, ::2].view(3, 4, -1)
    weight = asked.weight.T.contiguous().T
    shaped = replace(asked, hidden=hidden, weight=weight).changed(labels=labels)
    found, flat = best(shaped, impl), best(asked, impl)
    assert found.ids is not None and found.ids.shape == (3, 4, 5) and found.lse.shape == (3, 4)
    assert found.csr()[1].shape == (T + 1,)
    assert same_bits([x.flatten() for x in found if x is not None], [x.flatten() for x in flat])  # type: ignore[union-attr]


def test_autocast_casts_the_operands() -> None:
    asked = real_problem(k=3)
    with torch.autocast("cpu", torch.bfloat16):
        found = best(asked)
    assert same_bits(found, best(asked.to(torch.bfloat16)))


@both
@pytest.mark.parametrize("k", [1, 40])
def test_chunks_of_tokens_change_no_bit(impl: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(k=k)
    whole = best(asked, impl)
    monkeypatch.setattr(chunks, "PART_BYTES", 4 * 6 * 5 * 5)
    monkeypatch.setattr(eager, "SCRATCH_BYTES", 4 * V * 5)
    assert same_bits(best(asked, impl), whole)


@interpreted
@pytest.mark.parametrize("order", ["rising", "falling", "equal", "few blocks", "random"])
@pytest.mark.parametrize("k", [3, 60])
def test_candidates_that_do_not_fit_into_the_buffer(
    order: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of what was read are kept, the bound rises, and equal logits are no more read."""
    monkeypatch.setattr(winners, "AT_ONCE", 64)
    monkeypatch.setattr(winners, "_SORTED", 4)
    monkeypatch.setattr(winners, "_PART", tl.constexpr(32))
    g = torch.Generator().manual_seed(0)
    rising = torch.arange(V).float()
    z = {
        "rising": rising, "falling": -rising, "equal": 0 * rising,
        "few blocks": (rising < 100) * torch.randint(50, (V,), generator=g) + 0.0,
        "random": torch.randn(V, generator=g),
    }[order]  # fmt: skip
    labels = torch.tensor([5])
    inputs = with_logits(z[None], labels)
    asked = Asked(inputs.hidden, inputs.weight, None, k, {"labels": labels})
    compare(best(asked, "triton"), asked)


@interpreted
def test_waves_are_full_and_memory_has_a_bound() -> None:
    hidden, weight = torch.empty(8192, 8), torch.empty(128256, 8)
    labels = torch.zeros(8192, dtype=torch.long)
    logits = ShardLogits(hidden, weight, None, labels, 0, -100, 1.0, None)
    launch = tile_launch(logits)
    for k, counts in ((0, True), (1, True), (64, False)):
        step = chunks.chunk_tokens(8192, 128256, k, counts=counts, grid=shard_pass.grid_of(launch))
        assert 0 < step < 8192 and step % 32 == 0
        if k > 1:
            assert 4 * step * 128256 <= chunks.LOGITS_BYTES


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_waves_of_a_shard_are_full(ranks: int) -> None:
    V = 128256 // ranks
    launch = TileLaunch(tuning.TILES["sm_90", 2], 132, True, 8192, V, 256)
    step = chunks.chunk_tokens(8192, V, 64, counts=False, grid=shard_pass.grid_of(launch))
    tiles = step // launch.config.BLOCK_T * launch.num_v
    assert -tiles % 132 < 0.01 * tiles


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("k", [2, 64, 256, 1024, 2048])
def test_a_shard_has_as_many_blocks_as_ids(k: int, ranks: int) -> None:
    """Else no maximum bounds the k-th logit. Blocks are no narrower than that takes."""
    V = 128256 // ranks
    columns = shard_pass._block_columns(V, k)
    assert V // columns >= k or columns == 8
    assert columns == shard_pass.BLOCK_COLUMNS or V // (2 * columns) < k
