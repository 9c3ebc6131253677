"""What ranks gather takes the memory of sections, however many tokens there are."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from flce_dist import linear_cross_entropy, linear_divergence, linear_top_k
from flce_dist.kernels.best import chunks
from flce_dist.launch.peak_memory import peak_memory


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
            reduction="none", schedule="in_forward", max_logits_bytes=1, **options,
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

    Nor of sums in fp32, which are rounded section by section. Gathered tokens of both ranks would
    take twice as much again; a section's copies for gloo live as long as the other rank is late.
    """
    H = 512
    few, many = (max(pools[2].run(frozen_bytes, n, H, dtype, options)) for n in (2048, 8192))
    assert many - few <= (8192 - 2048) // 2 * H * dtype.itemsize * 2


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
    assert many - few <= (kept + 1) * of_rank
