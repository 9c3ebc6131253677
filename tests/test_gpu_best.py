"""Best ids, ranks and samples on a GPU: bits of tiles, hosts, graphs, memory; on a CPU, too."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_sample, linear_top_k
from flce_dist.launch.peak_memory import peak_memory
from tests.best_problem import best, compare, equal, problem, same_bits
from tests.devices import Replayed, each_device, host_must_not_wait, on_cuda
from tests.problems import interpreted


def operands(
    device: str, T: int, V: int, H: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(T + V)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g) * (2 / H**0.5)
    labels = torch.randint(V, (T,), generator=g)
    return hidden.to(device, dtype), weight.to(device, dtype), labels.to(device)


@on_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "tokens, rows, k", [(300, 5000, 64), (1000, 32060, 256), (7, 700, 600), (128, 70000, 2048)]
)
def test_ties_are_those_of_a_stable_sort(
    device: str, dtype: torch.dtype, tokens: int, rows: int, k: int
) -> None:
    asked = problem(dtype, k, tokens=tokens, rows=rows)
    compare(best(asked, "triton"), asked)
    compare(best(replace(asked, k=1), "triton"), replace(asked, k=1))


@pytest.mark.parametrize("options", [
    {},
    {"tp_invariant": True},
    {"softcap": 5.0, "temperature": 0.7, "logit_scale": 0.6},
    {"bias": True, "temperature": 0.7, "logit_scale": 0.6},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@each_device
def test_a_labels_logit_has_the_bits_of_its_tile(
    device: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """So its rank is its place in the list of all, however few tokens are in the call."""
    T, V, H = (700, 2000, 512) if device == "cuda" else (4, 70, 40)
    hidden, weight, labels = operands(device, T, V, H, dtype)
    given: dict[str, Any] = {"impl": "triton", **options}
    if "bias" in options:
        given["bias"] = weight[:, 0].contiguous()
    found = linear_top_k(hidden, weight, V, labels=labels, **given)
    assert found.ids is not None and found.logprob is not None
    place = (found.ids == labels[:, None]).int().argmax(1)
    assert equal(found.label_rank, place)
    assert equal(found.label_logprob, found.logprob.gather(1, place[:, None])[:, 0])
    few = linear_top_k(hidden[:3], weight, V, labels=labels[:3], **given)
    assert equal(few.ids, found.ids[:3]) and equal(few.label_rank, place[:3])
    ranks = linear_top_k(hidden, weight, labels=labels, **given)
    assert equal(ranks.label_rank, place) and equal(ranks.label_logprob, found.label_logprob)
    assert equal(linear_top_k(hidden, weight, 1, **given).ids, found.ids[:, :1])


def both_calls(hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    many = linear_top_k(hidden, weight, 20, labels=labels, top_p=0.9)
    one = linear_top_k(hidden, weight, 1, labels=labels)
    drawn = linear_sample(hidden, weight, 7)
    return [x for x in (*many, *one, *drawn) if x is not None]


@on_cuda
def test_the_host_never_waits(device: str) -> None:
    given = operands(device, 300, 5000, 64)
    both_calls(*given)
    with host_must_not_wait():
        both_calls(*given)


@each_device
def test_replayed_in_a_graph(device: str) -> None:
    T = 300 if device == "cuda" else 12
    given, other = operands(device, T, 5000, 64), operands(device, T, 5000, 64)[0].flip(0)
    replayed = Replayed(lambda: both_calls(*given), device)
    given[0].copy_(other)
    replayed.replay()
    assert same_bits(replayed.results, both_calls(*given))
    assert same_bits(both_calls(*given), both_calls(*given))


@on_cuda
@pytest.mark.parametrize("T", [8192, 65536])
def test_memory_has_a_bound_at_any_number_of_tokens(device: str, T: int) -> None:
    hidden, weight, labels = operands(device, T, 128256, 64)
    for call in calls_of(hidden, weight, labels):
        with peak_memory(device) as peak:
            found = call()
        held = sum(x.nbytes for x in found if x is not None)
        assert peak.bytes - 2 * held <= 400 << 20


@interpreted
def test_one_id_a_rank_and_a_sample_need_no_logits() -> None:
    T, V = 64, 4096
    hidden, weight, labels = operands("cpu", T, V, 8)
    _, *calls = calls_of(hidden, weight, labels, impl="triton")
    for call in calls:
        with peak_memory("cpu") as peak:
            call()
        assert 0 < peak.bytes < 4 * T * V / 2


def calls_of(
    hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any
) -> list[Callable[[], Any]]:
    return [
        lambda: linear_top_k(hidden, weight, 64, labels=labels, **options),
        lambda: linear_top_k(hidden, weight, 1, labels=labels, **options),
        lambda: linear_top_k(hidden, weight, labels=labels, **options),
        lambda: linear_sample(hidden, weight, 1, **options),
    ]
