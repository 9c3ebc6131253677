"""``low_rank``: what is refused, in words of the caller's shapes, and that ranks are alike."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from flce_dist import filtered, linear_cross_entropy
from flce_dist.testing import run_ranks
from tests.rank_calls import BEGINS
from tests.test_low_rank import H, R, T, V


@pytest.mark.parametrize("low_rank, options, complaint", [
    (torch.zeros(T, R), {}, r"^low_rank must be None or a pair of tensors \(x, b\), got a tensor"),
    ((torch.zeros(T, R), 1), {}, r"^low_rank\[1\] must be a torch.Tensor, got int"),
    ((torch.zeros(T, R), torch.zeros(V, R).double()), {}, r"^low_rank\[1\] must have dtype torch"),
    ((torch.zeros(T + 1, R), torch.zeros(V, R)), {}, r"^low_rank\[0\] must be \(60, r\) from"),
    ((torch.zeros(T, R), torch.zeros(R, V)), {}, r"^low_rank\[1\] must be \[V, r\] with V = 300"),
    ((torch.zeros(T, R), torch.zeros(V, R)), {"schedule": filtered.schedule(0.1)},
     r"^low_rank needs accumulate_dweight=False and a schedule that is a name"),
    ((torch.zeros(T, R), torch.zeros(V, R)), {"accumulate_dweight": True},
     r"^low_rank needs accumulate_dweight=False .* got accumulate_dweight=True"),
])  # fmt: skip
def test_refusals(low_rank: Any, options: dict[str, Any], complaint: str) -> None:
    hidden, weight = torch.zeros(T, H), torch.zeros(V, H)
    with pytest.raises((ValueError, NotImplementedError), match=complaint):
        linear_cross_entropy(hidden, weight, torch.arange(T), low_rank=low_rank, **options)


@pytest.mark.parametrize("weight, complaint", [
    (torch.zeros(V), rf"^weight must be \[V, H\] with H = {H} from hidden, got \({V},\)$"),
    (torch.zeros(H, V), rf"^weight must be \[V, H\] with H = {H} .*, pass weight.T$"),
    (torch.zeros(V, H - R), rf"^weight must be \[V, H\] with H = {H} .* got \({V}, {H - R}\)$"),
    (torch.zeros(V, H).bfloat16(), r"^weight must have hidden's dtype torch.float32, got torch.bf"),
])  # fmt: skip
def test_a_weight_is_refused_as_without_low_rank(weight: torch.Tensor, complaint: str) -> None:
    hidden, low_rank = torch.zeros(T, H), (torch.zeros(T, R), torch.zeros(V, R))
    for pair in (None, low_rank):
        with pytest.raises(ValueError, match=complaint):
            linear_cross_entropy(hidden, weight, torch.arange(T), low_rank=pair)


def test_ranks_that_train_other_columns_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLCE_DIST_CHECK_RANKS", "1")

    def rank(group: dist.ProcessGroup) -> str:
        r = R - group.rank()
        hidden, x, b = torch.zeros(T, H), torch.zeros(T, r), torch.zeros(V, r, requires_grad=True)
        with pytest.raises(ValueError) as error:
            linear_cross_entropy(
                hidden, torch.zeros(V, H), torch.arange(T), low_rank=(x, b), tp_group=group
            )
        return str(error.value)

    (said,) = set(run_ranks(rank, 2))
    assert said.startswith(f"{BEGINS}columns of low_rank is {R} on rank 0 and {R - 1} on rank 1")
    assert "hidden.shape" not in said


@pytest.mark.parametrize("tokens, options, complaint", [
    (T - 1, {}, rf"^labels must be \({T},\) from hidden \({T}, {H}\), got \({T - 1},\)"),
    (T, {"sequence_parallel": True},
     rf"^labels must be \({2 * T},\) from hidden \({T}, {H}\) for the tokens of all 2 ranks"),
    (T, {"sequence_parallel": True, "sequence_dim": 1},
     rf"^hidden must be \[B, S / P, ..., H\] .*, got \({T}, {H}\)"),
])  # fmt: skip
def test_complaints_name_the_shapes_of_the_caller(
    tokens: int, options: dict[str, Any], complaint: str
) -> None:
    def rank(group: dist.ProcessGroup) -> None:
        hidden, low_rank = torch.zeros(T, H), (torch.zeros(T, R), torch.zeros(V, R))
        labels = torch.arange(tokens)
        with pytest.raises(ValueError, match=complaint):
            linear_cross_entropy(
                hidden, torch.zeros(V, H), labels, low_rank=low_rank, tp_group=group, **options
            )

    run_ranks(rank, 2)
