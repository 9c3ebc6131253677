"""Sequence-parallel calls that are cut into sections: the same rows of every rank's tokens.

Here the loss; test_sections_elsewhere.py has divergences and best ids, test_sections_memory.py what
gathered tokens take.
"""

from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy_with_metrics
from flce_dist.core.sections import joined, rows_of_sections
from flce_dist.testing import relative_rms, run_ranks
from tests.parallel_problem import Problem, misses, on_threads, rank_step
from tests.parallel_problem import joined as joined_ranks

T = 768
LONG = Problem(T=T, V_all=127)
IN_CHUNKS: dict[str, Any] = {"schedule": "in_forward", "max_logits_bytes": 1}  # of 256 tokens
FROZEN = ("weight", "bias")


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
