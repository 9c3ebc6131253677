"""Sequence-parallel calls that are cut into sections: the same rows of every rank's tokens."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import (
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
    linear_divergence,
    linear_top_k,
)
from flce_dist.core.sections import joined, rows_of_sections
from flce_dist.divergence import choose
from flce_dist.kernels.best import chunks
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.testing import relative_rms, run_ranks
from tests import best_problem, divergence_problem
from tests.parallel_problem import Problem, misses, on_threads, rank_step
from tests.parallel_problem import joined as joined_ranks
from tests.problems import both, pairwise
from tests.test_sample import draw

T = 768
LONG = Problem(T=T, V_all=127)
IN_CHUNKS: dict[str, Any] = {"schedule": "in_forward", "max_logits_bytes": 1}  # of 256 tokens
FROZEN = ("weight", "bias")

pytestmark = pytest.mark.usefixtures("one_launch_at_a_time")


@pytest.mark.parametrize(
    ("T", "P", "most", "rows"),
    [
        (16, 2, (8,), [(0, 4), (4, 8)]),
        (16, 2, (6, 4), [(0, 3), (3, 5), (5, 7), (7, 8)]),
        (12, 3, (5,), [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (12, 4, (1, 1), [(0, 1), (1, 2), (2, 3)]),
        (12, 4, (100,), [(0, 3)]),
        (0, 4, (8,), [(0, 0)]),
    ],
)
def test_rows_of_sections(T: int, P: int, most: Any, rows: list[tuple[int, int]]) -> None:
    assert rows_of_sections(T, P, most) == rows


def test_what_is_cut_is_joined_in_order() -> None:
    x = torch.arange(24).view(12, 2)
    parts = [x.view(3, 4, 2)[:, rows].flatten(0, 1) for rows in (slice(0, 3), slice(3, 4))]
    assert torch.equal(joined(parts, 3), x)
    assert torch.equal(joined([x[:5], x[5:]], 1), x)


def options_of(**options: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(7)
    if "token_weight" in options:
        options["token_weight"] = torch.rand(T, generator=g)
    if "temperature" in options:
        options["temperature"] = 0.5 + torch.rand(T, generator=g)
    return options


@pytest.mark.parametrize("P", [2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "token_weight": True},
        {"temperature": True, "label_smoothing": 0.1, "z_loss_weight": 1e-3},
    ],
    ids=str,
)
def test_loss_and_gradients(P: int, options: dict[str, Any]) -> None:
    problem = LONG.changed(options=options_of(**options))
    outcome = on_threads(P, problem, sequence_parallel=True, **IN_CHUNKS)
    assert misses(outcome, problem) == []
    assert sum("scatter" in call for call in outcome.calls) >= T // 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_frozen_heads(dtype: torch.dtype, reduction: str) -> None:
    """Each token's upstream gradient, weight and temperature go with it."""
    some = options_of(token_weight=True, temperature=True, reduction=reduction)
    problem = LONG.changed(dtype=dtype, options=some)
    frozen = on_threads(2, problem, sequence_parallel=True, frozen=FROZEN, **IN_CHUNKS)
    parts = ("loss", "dhidden")
    truth, eager = problem.truth
    for name in parts:
        error = relative_rms(frozen[name].double(), truth[name].double())
        allowed = relative_rms(eager[name].double(), truth[name].double())
        assert error <= 2 * allowed + 1e-6, name


@pytest.mark.parametrize("P", [2, 3])
def test_metrics_are_in_the_order_of_tokens(P: int) -> None:
    def metrics(group: Any) -> Any:
        hidden, weight, bias, labels = LONG.tensors
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        rows = [x.tensor_split(size)[rank] for x in (weight, bias)]
        start = sum(len(x) for x in weight.tensor_split(size)[:rank])
        mine = hidden.tensor_split(size)[rank].requires_grad_()
        weight_here = rows[0].requires_grad_()
        options: dict[str, Any] = {"bias": rows[1], **IN_CHUNKS}
        if group is not None:
            ends = (start, start + len(weight_here))
            options |= {"tp_group": group, "vocab_range": ends, "vocab_size": 127}
            options |= {"sequence_parallel": True}
        return linear_cross_entropy_with_metrics(mine, weight_here, labels, **options)

    alone = metrics(None)
    for found in run_ranks(metrics, P):
        for x, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(x, expected)


def test_an_uncut_call_has_the_same_loss_bits() -> None:
    cut = on_threads(2, LONG, sequence_parallel=True, **IN_CHUNKS)
    whole = on_threads(2, LONG, sequence_parallel=True, schedule="in_forward")
    assert torch.equal(cut.loss, whole.loss)
    assert len([call for call in whole.calls if "allgather" in call]) == 1


def test_chosen_tokens_are_not_cut() -> None:
    """They may lie anywhere, so all tokens are gathered at once."""
    problem = LONG.changed(ignored=0.5)
    most = int((problem.tensors[3] >= 0).sum())
    outcome = on_threads(2, problem, sequence_parallel=True, max_counted=most, **IN_CHUNKS)
    assert misses(outcome, problem) == []
    assert len([call for call in outcome.calls if "allgather" in call]) == 1


def test_a_hidden_state_travels_while_the_section_before_is_computed() -> None:
    """A section's gather begins before the statistics of the one before, its label logits travel
    before that one's gradients.
    """

    def names(group: Any) -> Any:
        found = rank_step(group, LONG, sequence_parallel=True, **IN_CHUNKS)
        return joined_ranks([found], sequence_parallel=True).calls

    kinds = [call.split()[0] for call in run_ranks(names, 2)[0]]
    statistics = ["allreduce"] * 2
    label_logits = ["allreduce"]
    gather = ["allgather"]
    gradients = ["reduce_scatter"]
    expected = [*gather, *gather, *label_logits, *statistics, *label_logits, *gradients]
    expected += [*gather, *statistics, *label_logits, *gradients, *statistics, *gradients]
    assert kinds == expected


GROUP_T = 128
"""Tokens of a divergence's section, if no budget allows more."""


def gathered(calls: Sequence[str], dtype: str) -> list[int]:
    """Elements of this rank in each gather of such numbers."""
    found = (re.fullmatch(rf"allgather {dtype}\[(\d+)\]", call) for call in calls)
    return [int(match[1]) for match in found if match]


def check_gathers(
    calls: Sequence[str], T: int, P: int, most: int, passes: int, kind: str = "reverse_kl"
) -> None:
    """Check that hidden states of each section travel alone: one model's, then the other's."""
    rows = [end - start for start, end in rows_of_sections(T, P, (most,))]
    assert len(rows) > 1
    first, second = divergence_problem.H, divergence_problem.H_T
    if kind == "forward_kl":
        first, second = second, first
    of_sections = [(n * first, n * second) for n in rows]
    pairs = itertools.pairwise(gathered(calls, "float64"))
    assert [pair for pair in pairs if pair in of_sections] == of_sections * passes


@pytest.mark.parametrize(
    ("kind", "P", "way"),
    pairwise((k, P, way) for k in divergence_problem.KINDS for P in (2, 3, 4) for way in range(4)),
)
def test_divergences(kind: str, P: int, way: int) -> None:
    ways: list[dict[str, Any]] = [
        {"reduction": "mean"},
        {"reduction": "sum", "token_weight": torch.linspace(0.1, 2.0, 384)},
        {"reduction": "none", "schedule": "recompute"},
        {"reduction": "none", "temperature": torch.linspace(0.5, 2.0, 384)},
    ]
    given = divergence_problem.problem(
        torch.float64, kind=kind, tokens=(384,), max_logits_bytes=1, **ways[way]
    )
    found = divergence_problem.on_ranks(given, P, sequence_parallel=True, with_metrics=True)
    divergence_problem.compare(found, given, with_metrics=True)
    passes = 2 if ways[way]["reduction"] == "none" else 1
    check_gathers(found.calls, 384, P, GROUP_T, passes, kind)


@pytest.mark.parametrize(
    "way", [{"reduction": "mean"}, {"reduction": "none", "schedule": "recompute"}]
)
def test_a_divergence_whose_section_is_more_than_a_group(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five ranks a row each, where a group holds four tokens."""
    monkeypatch.setattr(choose, "_TILE_T", 4)
    choose.sizes.cache_clear()
    given = divergence_problem.problem(torch.float64, tokens=(15,), max_logits_bytes=1, **way)
    found = divergence_problem.on_ranks(given, 5, sequence_parallel=True, with_metrics=True)
    choose.sizes.cache_clear()
    divergence_problem.compare(found, given, with_metrics=True)
    passes = 2 if way["reduction"] == "none" else 1
    check_gathers(found.calls, 15, 5, 4, passes)


def test_a_divergence_without_gradients() -> None:
    given = divergence_problem.problem(torch.float64, tokens=(384,), max_logits_bytes=1)
    with torch.no_grad():
        expected = divergence_problem.linear_divergence(**given.operands, **given.options)

    def value(group: Any) -> tuple[Tensor, Sequence[str]]:
        mine = {name: x.tensor_split(2)[group.rank()] for name, x in given.operands.items()}
        with torch.no_grad():
            loss = divergence_problem.linear_divergence(
                **mine, **given.options, tp_group=group, sequence_parallel=True
            )
        return loss, group.calls

    for found, calls in run_ranks(value, 2):
        torch.testing.assert_close(found, expected)
        check_gathers(calls, 384, 2, GROUP_T, passes=1)


@both
@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("k", [None, 1, 5])
def test_best_ids(impl: str, P: int, k: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = best_problem.problem(k=k)
    monkeypatch.setattr(chunks, "PART_BYTES", 4 * 5 * 5)
    calls: list[str] = []
    found = best_problem.on_ranks(asked, P, impl, sequence_parallel=True, calls=calls)
    best_problem.compare(found, asked)
    hidden = gathered(calls, "float32")
    assert len(hidden) > 1 and sum(hidden) == asked.hidden.numel() // P


@both
def test_samples(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = best_problem.replace(best_problem.real_problem(k=None), options={})
    whole = draw(asked, impl)
    monkeypatch.setattr(chunks, "PART_BYTES", 4 * 5 * 5)
    calls: list[str] = []
    found = best_problem.on_ranks(asked, 2, impl, sequence_parallel=True, call=draw, calls=calls)
    assert torch.equal(found.ids, whole.ids)
    best_problem.close(found.logprob, whole.logprob)
    hidden = gathered(calls, "float32")
    assert len(hidden) > 1 and sum(hidden) == asked.hidden.numel() // 2


def frozen_bytes(
    group: dist.ProcessGroup, tokens: int, H: int, dtype: torch.dtype, options: dict[str, Any]
) -> int:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens // 2, H, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(8, H, generator=g).to(dtype)
    labels = torch.randint(16, (tokens,), generator=g)
    with peak_memory("cpu") as peak:
        linear_cross_entropy(
            hidden, weight, labels, tp_group=group, sequence_parallel=True,
            reduction="none", **IN_CHUNKS, **options,
        )  # fmt: skip
    return peak.bytes


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"reduce_in_fp32": True})],
    ids=str,
)
def test_gathered_tokens_take_the_memory_of_sections(
    dtype: torch.dtype, options: dict[str, Any], pools: Any
) -> None:
    """Four times the tokens: four times dhidden of this rank's, and no more of all ranks'.

    Nor of sums in fp32, which are rounded section by section.
    """
    H = 512
    few, many = (max(pools[2].run(frozen_bytes, n, H, dtype, options)) for n in (2048, 8192))
    assert many - few <= (8192 - 2048) // 2 * H * dtype.itemsize * 1.2


def divergence_bytes(group: dist.ProcessGroup, tokens: int, H: int) -> int:
    g = torch.Generator().manual_seed(0)
    hidden, teacher_hidden = torch.randn(2, tokens // 2, H, generator=g)
    weight, teacher_weight = torch.randn(2, 8, H, generator=g)
    operands = (hidden.requires_grad_(), weight, teacher_hidden, teacher_weight)
    with peak_memory("cpu") as peak:
        linear_divergence(
            *operands, tp_group=group, sequence_parallel=True,
            schedule="in_forward", max_logits_bytes=1,
        )  # fmt: skip
    return peak.bytes


def best_bytes(group: dist.ProcessGroup, tokens: int, H: int) -> int:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens // 2, H, generator=g)
    weight = torch.randn(8, H, generator=g)
    with pytest.MonkeyPatch.context() as patch, peak_memory("cpu") as peak:
        patch.setattr(chunks, "PART_BYTES", 1 << 12)
        linear_top_k(hidden, weight, 1, tp_group=group, sequence_parallel=True)
    return peak.bytes


@pytest.mark.parametrize(("call", "kept"), [(divergence_bytes, 1), (best_bytes, 0)])
def test_gathered_tokens_of_other_calls_take_the_memory_of_sections(
    call: Any, kept: int, pools: Any
) -> None:
    """Of a divergence this rank's dhidden remains, of best ids nothing as large."""
    H = 512
    few, many = (max(pools[2].run(call, n, H)) for n in (2048, 8192))
    of_rank = (8192 - 2048) // 2 * H * 4
    assert many - few <= (kept + 0.2) * of_rank
