"""``linear_sample``: the distribution of its draws, and that they depend on what they should."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist import SampledIds, linear_sample
from flce_dist.kernels.best import noise
from tests.best_problem import Asked, close, on_ranks, problem, real_problem, same_bits
from tests.problems import both, device_of

pytestmark = pytest.mark.usefixtures("one_launch_at_a_time")

SEED = 2**40 + 7


def draw(asked: Asked, impl: Any = "eager", *, seed: int = SEED, **options: Any) -> SampledIds:
    there = asked.moved(device_of(impl))
    given = {name: x for name, x in there.options.items() if name != "labels"}
    found = linear_sample(
        there.hidden, there.weight, seed, bias=there.bias, impl=impl, **{**given, **options}
    )
    return SampledIds(*(x.cpu() for x in found))


def chi_square(ids: Tensor, p: Tensor) -> float:
    """Return how many standard deviations the statistic is above its mean."""
    expected = p * len(ids)
    assert expected.min() >= 5
    counts = torch.bincount(ids, minlength=len(p))
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(p) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def one_distribution(z: Tensor, n: int) -> Asked:
    return Asked(torch.ones(n, 1), z[:, None].clone(), None, None)


@pytest.mark.parametrize("z", [
    torch.zeros(50), torch.linspace(-4, 4, 50), torch.tensor([8.0, 0.0, 0.0, 0.0, 1.0]),
], ids=["even", "sloping", "peaked"])  # fmt: skip
def test_distribution_of_100_000_draws(z: Tensor) -> None:
    n = 100_000
    ids = draw(one_distribution(z, n)).ids
    p = z.double().softmax(0)
    assert chi_square(ids, p) < 5.0
    pairs = ids[: n // 2 * 2].view(-1, 2)  # neighbours are independent
    of_pair = (p[:, None] * p).flatten()
    large = of_pair * len(pairs) >= 5
    pair = (pairs[:, 0] * len(p) + pairs[:, 1])[large[pairs[:, 0] * len(p) + pairs[:, 1]]]
    counts = torch.bincount(pair, minlength=len(of_pair))[large]
    expected = of_pair[large] * len(pairs)
    freedom = int(large.sum())
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert (statistic - freedom) / (2 * freedom) ** 0.5 < 5.0


@both
def test_distribution_at_a_temperature(impl: str) -> None:
    z, n = torch.linspace(-1, 1, 8), 4000
    found = draw(one_distribution(z, n), impl, temperature=0.5)
    p = (z.double() / 0.5).softmax(0)
    assert chi_square(found.ids, p) < 5.0
    close(found.logprob, p.log()[found.ids])


@both
def test_draws_are_those_of_the_noise(impl: str) -> None:
    asked = real_problem(k=None)
    found = draw(asked, impl)
    assert asked.bias is not None
    z = asked.hidden.double() @ asked.weight.double().T + asked.bias
    g = noise.eager_gumbel(SEED, torch.arange(len(z)), 0, z.shape[1])
    assert torch.equal(found.ids, (z + g).argmax(1))
    close(found.logprob, z.log_softmax(1).gather(1, found.ids[:, None])[:, 0])


@both
def test_draws_of_seeds_and_counters(impl: str) -> None:
    asked = real_problem(k=None)
    whole, other = draw(asked, impl), draw(asked, impl, seed=SEED + 1)
    assert (whole.ids != other.ids).any()
    order = torch.tensor([7, 2, 2, 11, 0])
    some = replace(asked, hidden=asked.hidden[order], options={})
    again = draw(some, impl, counters=order.to(device_of(impl)))
    assert torch.equal(again.ids, whole.ids[order])
    far = draw(some, impl, counters=(order + 2**33).to(device_of(impl)))
    assert (again.ids != far.ids).any() and far.ids[1] == far.ids[2]


@both
@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_draws_of_any_number_of_ranks(impl: str, P: int, sequence_parallel: bool) -> None:
    """Shards of 165 and 110 rows: noise is that of global ids, in whichever quarter of a call."""
    asked = replace(real_problem(k=None), options={})
    found = on_ranks(asked, P, impl, sequence_parallel=sequence_parallel, call=draw)
    assert torch.equal(found.ids, draw(asked, impl).ids)


def test_the_same_bits_for_any_number_of_ranks() -> None:
    asked = replace(real_problem(torch.bfloat16, None, rows=360), options={"vocab_size": 330})
    one = draw(asked, "triton", tp_invariant=True)
    for P in (2, 5):
        assert same_bits(on_ranks(asked, P, "triton", tp_invariant=True, call=draw), one), P


@both
def test_what_cannot_be_drawn(impl: str) -> None:
    asked = problem(k=None, labelled=False)
    assert asked.bias is not None
    found = draw(asked, impl)
    assert (asked.bias[found.ids] > -torch.inf).all()
    asked.hidden[3] = torch.nan
    found = draw(asked, impl)
    assert found.ids[3] == -1 and found.logprob[3].isnan()
    assert (found.ids[:3] >= 0).all() and found.logprob[:3].isfinite().all()
    asked.bias[:] = -torch.inf
    asked.bias[77] = 0.0
    found = draw(asked, impl)
    assert (found.ids == torch.where(torch.arange(len(found.ids)) == 3, -1, 77)).all()
    asked.bias[77] = -torch.inf
    found = draw(asked, impl)
    assert (found.ids == -1).all() and (found.logprob[:3] == -torch.inf).all()
    empty = draw(replace(asked, hidden=asked.hidden[:0]), impl)
    assert empty.ids.shape == empty.logprob.shape == (0,)


def test_sequences_that_are_split_along_their_second_dimension() -> None:
    asked = replace(real_problem(k=None), options={})
    shaped = replace(asked, hidden=asked.hidden.view(3, 4, -1), options={"sequence_dim": 1})
    found = on_ranks(shaped, 2, sequence_parallel=True, call=draw)
    assert torch.equal(found.ids.flatten(), draw(asked).ids)


def test_philox_is_that_of_its_authors() -> None:
    """Random123's known answer of 7 rounds for counter 0 and key 0."""
    zero = torch.zeros(1, dtype=torch.long)
    words = [f"{int(x):08x}" for x in noise._philox(0, zero, zero, zero)]
    assert words == ["5f6fb709", "0d893f64", "4f121f81", "4f730a48"]


@triton.jit
def _noise_kernel(seed_ptr, counters_ptr, out_ptr, T, first_id, ALIGNED: tl.constexpr):
    offs_t, offs_v = tl.arange(0, 16), tl.arange(0, 64)
    g = noise.gumbel((seed_ptr, counters_ptr), offs_t, offs_t < T, first_id, offs_v, ALIGNED)
    tl.store(out_ptr + offs_t[:, None] * 64 + offs_v[None, :], g, mask=(offs_t < T)[:, None])


@pytest.mark.parametrize("first_id, aligned", [(0, True), (4096, True), (4096, False), (37, False)])
def test_the_kernels_noise_is_that_of_eager(first_id: int, aligned: bool) -> None:
    counters = torch.arange(13) * 977 * 2**28
    out = torch.full((13, 64), torch.nan)
    _noise_kernel[(1,)](torch.tensor(SEED), counters, out, 13, first_id, aligned)
    truth = noise.eager_gumbel(SEED, counters, first_id, 64)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)


def test_the_tail_of_the_noise_is_fine() -> None:
    """The largest of many decides: its exponential must not be a multiple of a coarse unit."""
    g = noise.eager_gumbel(3, torch.arange(400), 0, 4096).amax(1)
    shifted = (-(g - torch.tensor(4096.0).log()).exp().reciprocal()).exp()  # uniform
    counts = torch.histc(shifted.float(), 10, 0.0, 1.0)
    assert ((counts - 40) ** 2 / 40).sum() < 9 + 5 * 18**0.5
    assert len(g.unique()) == 400


@pytest.mark.parametrize(("arguments", "complaint"), [
    ({"seed": -1}, r"seed must be an int within \[0, 2\*\*63\), got -1"),
    ({"seed": 0.5}, "seed must be an int"),
    ({"counters": torch.arange(5)}, r"counters must be \(12,\), as tokens, got \(5,\)"),
    ({"counters": torch.rand(12)}, "counters must have dtype torch.int64 or torch.int32"),
    ({"labels": torch.arange(12)}, "unexpected keyword argument 'labels'"),
    ({"max_counted": 3}, "unexpected keyword argument 'max_counted'"),
])  # fmt: skip
def test_refusals(arguments: dict[str, Any], complaint: str) -> None:
    asked = problem(labelled=False)
    with pytest.raises((ValueError, TypeError), match=complaint):
        linear_sample(asked.hidden, asked.weight, **{"seed": 1, **arguments})
    with pytest.raises(NotImplementedError, match="linear_sample has no gradients, got hidden"):
        linear_sample(asked.hidden.requires_grad_(), asked.weight, 1)
